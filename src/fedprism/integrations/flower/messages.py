"""Flower's messages as tensors and plain values, read and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor, nn

from fedprism.errors import BadInput
from fedprism.integrations.facts import Value, plain_metrics
from fedprism.integrations.recording import named

EXAMPLES = ("num-examples", "num_examples")
"""What the number of examples is called in messages, and in those of clients with fit()."""

MOST_EXAMPLES = 2**31
"""More than this a capture does not hold."""


def is_training(message: Message) -> bool:
    return str(message.metadata.message_type).partition(".")[0] == "train"


def tensors_of(message: Message, model: nn.Module | None) -> dict[str, Tensor]:
    """The model in a message, under its state_dict names; empty where there is none."""
    records = list(message.content.array_records.values())
    if len(records) > 1:
        raise BadInput(
            f"expected one model in a message, found {len(records)} records of arrays; send what belongs to the model "
            "in one ArrayRecord."
        )
    return named({name: tensor_of(array) for name, array in records[0].items()}, model) if records else {}


def tensor_of(array: Any) -> Tensor:
    """A copy of one array: Flower's own memory may be read-only, and its bytes are whatever the other side sent."""
    try:
        return torch.from_numpy(np.array(array.numpy(), order="C"))
    except (TypeError, ValueError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"expected arrays of numbers, found another one ({reason}); leave it out.") from error


def examples_of(message: Message, key: str | None = None) -> int | None:
    """How many examples a client says it trained on, in plain text; None where it gives no such number."""
    for record in message.content.metric_records.values():
        for name in (key, *EXAMPLES):
            value = record.get(name) if name is not None else None
            if isinstance(value, int | float) and 1 <= value <= MOST_EXAMPLES and value == int(value):
                return int(value)
    return None


def metrics_of(message: Message) -> dict[str, Value]:
    """What else a client says in plain text; the number of examples, the status and protocol keys are no metrics."""
    metrics: dict[str, Value] = {}
    records: list[tuple[str, Mapping[str, Any]]] = list(message.content.metric_records.items())
    # Clients with fit() have their metrics in a record of configurations.
    records += [(name, r) for name, r in message.content.config_records.items() if name.endswith(".metrics")]
    for _, record in records:
        metrics.update(plain_metrics({name: value for name, value in record.items() if name not in EXAMPLES}))
    return metrics


def round_of(message: Message) -> int | None:
    """The number of the round that a message belongs to, where it says so."""
    for record in message.content.config_records.values():
        stated = record.get("server-round")
        if isinstance(stated, int) and not isinstance(stated, bool) and stated >= 0:
            return stated
    group = str(message.metadata.group_id)
    return int(group) if group.isdecimal() and len(group) < 10 else None
