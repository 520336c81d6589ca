"""From what was sent and what came back to a round: clients return weights, differences of weights, or gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.files.tensors import STORED_TYPES
from fedprism.types import Reduction, Round, Update

Uplink = Literal["weights", "difference", "gradient"]
UPLINKS: tuple[Uplink, ...] = ("weights", "difference", "gradient")

HALF_OF_THE_MODEL = 0.5
"""Answers that hold more than this part of the model that was sent are weights (1 up to training), others differences
(0 up to training)."""
MOST_BLUR = 0.1
"""Standard deviation of that part beyond which noise decides it, so that nothing is told."""


class Answer(NamedTuple):
    """What one client sent back, or what several did as their sum or mean; the tensors are copies."""

    participants: tuple[str, ...]
    tensors: Update
    examples: tuple[int, ...] | None = None
    reduction: Reduction = "mean"


class Sent(NamedTuple):
    """A model that was sent. The same one for all clients that it was sent to, so that it is written once."""

    params: Update
    buffers: Update

    @classmethod
    def of(cls, state: Update, buffers: Collection[str]) -> Sent:
        params = {name: tensor for name, tensor in state.items() if name not in buffers}
        return cls(params, {name: tensor for name, tensor in state.items() if name in buffers})


def part_of_model(pairs: Iterable[tuple[Sent, Answer]]) -> float | None:
    """How much of the model that was sent is in the answers: about 1 for weights, about 0 for differences.

    It is the factor of the model that fits the answers best. None if nothing tells: a model of zeros, or much noise.
    """
    product, square, rest, entries = 0.0, 0.0, 0.0, 0
    for sent, answer in pairs:
        for name, tensor in answer.tensors.items():
            model = sent.params.get(name)
            if model is None or model.shape != tensor.shape:
                continue
            if not tensor.dtype.is_floating_point or not model.dtype.is_floating_point:
                continue
            before, after = model.double(), tensor.double()
            product += float((after * before).sum())
            square += float(before.square().sum())
            rest += float(after.square().sum())
            entries += tensor.numel()
    if not square > 0 or not math.isfinite(product + rest):
        return None
    part = product / square
    # Of noise as strong as what the model does not explain, so much falls along the model by chance.
    blur = math.sqrt(max(rest / square - part**2, 0.0) / entries)
    return part if blur <= MOST_BLUR else None


def round_of(sent: Sent, answer: Answer, *, index: int, uplink: Uplink = "weights") -> Round:
    """The round behind a model that was sent and an answer to it; what cannot be recorded is a BadInput."""
    check_fits({**sent.params, **sent.buffers}, answer.tensors)
    update = {name: tensor for name, tensor in answer.tensors.items() if name in sent.params}
    if not update:
        raise BadInput("there is no update of any parameter. Send the trained ones.")
    if uplink == "weights":
        update = {name: difference(tensor, sent.params[name]) for name, tensor in update.items()}
    after = {name: tensor for name, tensor in answer.tensors.items() if name in sent.buffers}
    if uplink == "difference":
        after = {name: sent.buffers[name] + change.to(sent.buffers[name].dtype) for name, change in after.items()}
    after = {name: tensor.to(precision(sent.buffers[name], tensor)) for name, tensor in after.items()}
    counted = answer.examples is not None and len(answer.examples) == len(answer.participants)
    return Round(
        index=index,
        params=sent.params,
        update=update,
        kind="gradient" if uplink == "gradient" else "delta",
        reduction=answer.reduction,
        clients=len(answer.participants),
        participants=answer.participants,
        examples=answer.examples if counted and all(n > 0 for n in answer.examples or ()) else None,
        buffers_before=sent.buffers or None,
        buffers_after=after or None,
    )


def check_fits(sent: Update, received: Update) -> None:
    """Whether `received` holds tensors of the model that was sent, in finite numbers."""
    for name, tensor in received.items():
        if name not in sent or sent[name].shape != tensor.shape:
            problem = f"shape {tuple(tensor.shape)}" if name in sent else "no such tensor in it"
            raise BadInput(f"{shown(name)} does not fit the model that was sent: {problem}. Leave it out.")
        if tensor.dtype not in STORED_TYPES or sent[name].dtype not in STORED_TYPES:
            kinds = f"{sent[name].dtype} sent and {tensor.dtype} received"
            raise BadInput(f"{shown(name)} holds {kinds}, not real or whole numbers. Leave it out.")
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise BadInput(f"{shown(name)} holds NaN or infinity. Leave it out.")


def precision(sent: Tensor, received: Tensor) -> torch.dtype:
    """The precision of the model for real numbers, or that of the answer if the model is in 16 bits.

    Counters stay as they came: averaged ones are no whole numbers.
    """
    if not sent.dtype.is_floating_point:
        return received.dtype
    half = sent.dtype.itemsize == 2 and received.dtype.is_floating_point
    return torch.promote_types(sent.dtype, received.dtype) if half else sent.dtype


def difference(after: Tensor, before: Tensor) -> Tensor:
    """After minus before, rounded once to the precision of the model."""
    if not before.dtype.is_floating_point:
        return after.to(before.dtype) - before if before.dtype != torch.bool else after.to(before.dtype) ^ before
    return (after.double() - before.double()).to(precision(before, after))
