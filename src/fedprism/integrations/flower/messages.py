"""Flower's messages as tensors and plain values, read and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor, nn

from fedprism.errors import BadInput
from fedprism.integrations.arrays import named, not_numbers, tensor_of
from fedprism.integrations.facts import MOST_NAME, Value, plain_metrics

EXAMPLES = ("num-examples", "num_examples")
"""What the number of examples is called in messages, and in those of clients with fit()."""

MODEL_RECORD = "arrays"
"""What the record that holds the model is called unless a strategy says otherwise."""

MOST_EXAMPLES = 2**31
"""More than this a capture does not hold."""


def is_training(message: Message) -> bool:
    return str(message.metadata.message_type).partition(".")[0] == "train"


class Carried(NamedTuple):
    """What a message carries: the model under its state_dict names, and how many tensors stand in other records."""

    model: dict[str, Tensor]
    others: dict[str, int]


def carried_by(message: Message, model: nn.Module | None, key: str = MODEL_RECORD) -> Carried:
    """The model in a message, which may be spread over records, and the names of those that are not part of it.

    The record called `key` is the model, or else the first one. Others belong to it if they hold further tensors of
    `model`, as a head beside a backbone does; control variates, which are called like it, do not.
    """
    tensors, others = dict[str, Tensor](), dict[str, int]()
    known = dict(model.state_dict()) if model is not None else {}
    for place, (name, record) in enumerate(ordered(message.content.array_records, key)):
        if place == 0:
            tensors = named(tensors_in(record), model)
        elif len(record) and all(each in known and each not in tensors for each in record):
            tensors |= named(tensors_in(record), model)
        elif len(record):
            others[str(name)[:MOST_NAME]] = len(record)
    return Carried(tensors, others)


def model_in(message: Message, model: nn.Module | None) -> dict[str, Tensor]:
    """The model in a message, under its state_dict names, for a client that must not overlook any array."""
    carried = carried_by(message, model)
    if carried.others:
        raise BadInput(
            f"a message holds arrays beside the model ({' and '.join(carried.others)}). Send what belongs "
            "to the model in one ArrayRecord."
        )
    return carried.model


def array_of(tensor: Tensor) -> Array:
    """A tensor as Flower sends it; bfloat16, which NumPy does not know, as its plain bytes under its name."""
    if tensor.dtype != torch.bfloat16:
        return Array(tensor.numpy())
    plain = Array(tensor.view(torch.int16).numpy().view("V2"))
    return Array("bfloat16", plain.shape, plain.stype, plain.data)


def ordered(records: Mapping[str, ArrayRecord], key: str = MODEL_RECORD) -> list[tuple[str, ArrayRecord]]:
    """The records of a message, the one that holds the model first."""
    return sorted(records.items(), key=lambda each: each[0] != key)


def tensors_in(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: _tensor(array) for name, array in record.items()}


def _tensor(array: Array) -> Tensor:
    """A copy: Flower's own memory may be read-only, and its bytes are whatever the other side sent."""
    try:
        values = array.numpy()
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise not_numbers(error) from error
    return tensor_of(values, array.dtype)


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
