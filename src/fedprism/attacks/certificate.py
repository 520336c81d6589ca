"""How much of an update guessed samples leave unexplained: the check behind every answer that is called exact."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprism.attacks.gradient_matching.forward import Forward, forward_model
from fedprism.client.observed import direction
from fedprism.errors import FedprismError, MissingKnowledge
from fedprism.inputs import Inputs, tensors_of
from fedprism.types import Batch, Observation, Update

HALF_FORMATS = (torch.bfloat16, torch.float16)
"""Number formats that updates are rounded to on their way, coarsest first."""


def unexplained(observation: Observation, inputs: Inputs, labels: Tensor) -> float | None:
    """The share of the observed update that does not point along the update these samples give; None where unknowable.

    It is the sine of the angle between the two, over all tensors that were sent: 0 is all explained, 1 nothing. The
    scale of an update is never taken for known, because clipping, weights and learning rates change it.
    """
    if not len(labels) or any(len(tensor) != len(labels) for tensor in tensors_of(inputs)):
        return None
    try:
        forward = _forward(observation)
    except FedprismError:
        return None
    like = forward.target[0]
    guess = Batch(inputs, labels).to(like.device, like.dtype)
    return sine(forward(guess.inputs, guess.labels, create_graph=False), forward.target)


def sine(first: list[Tensor], second: tuple[Tensor, ...]) -> float:
    """The sine of the angle between two lists of tensors, each taken as one vector; 1 if one of them is zero."""
    products = [(_dot(a, b), _dot(a, a), _dot(b, b)) for a, b in zip(first, second, strict=True)]
    both, of_first, of_second = (math.fsum(column) for column in zip(*products, strict=True))
    if not (of_first > 0 and of_second > 0 and math.isfinite(of_first)):
        return 1.0
    # Not from the cosine: a difference of nearly equal numbers would lose half of the digits.
    factor = both / of_first
    pairs = zip(first, second, strict=True)
    missed = math.fsum(float((b.double() - factor * a.double()).square().sum()) for a, b in pairs)
    return math.sqrt(missed / of_second)


def rounding_error(update: Update) -> float:
    """The largest residual that rounding alone explains, for the number format that an update was sent in.

    The format is read off the numbers: values that half precision holds exactly were rounded to it on their way.
    """
    tensors = [tensor for tensor in update.values() if tensor.is_floating_point()]
    for dtype in HALF_FORMATS:
        if all(bool((tensor.to(dtype).to(tensor.dtype) == tensor).all()) for tensor in tensors):
            return torch.finfo(dtype).eps
    return max((math.sqrt(torch.finfo(tensor.dtype).eps) for tensor in tensors), default=0.0)


def certified(observation: Observation, inputs: Inputs, labels: Tensor | None) -> bool | None:
    """Whether these samples give the observed update to rounding error; None where nobody can tell."""
    residual = unexplained(observation, inputs, labels) if labels is not None else None
    return None if residual is None else residual <= rounding_error(direction(observation.round))


def _forward(observation: Observation) -> Forward:
    """The client's training as far as it is known; a delta of unknown training is read as one gradient step."""
    try:
        return forward_model(observation, observation.round)
    except MissingKnowledge as missing:
        if missing.field in ("loss", "model"):
            raise
        return forward_model(observation, observation.round, unroll=False)


def _dot(first: Tensor, second: Tensor) -> float:
    return float((first.double() * second.double()).sum())
