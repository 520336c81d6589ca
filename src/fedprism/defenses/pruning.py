"""Gradient pruning: send only the largest entries of each tensor.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (section 5.2); evaluated as GradPrune by Huang, Gupta, Song,
Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.

Differs from the published code in: tensors may have any size; of entries that equal the threshold only as many stay as
the ratio leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.checks import probability
from fedprism.defenses.base import Context, Defense
from fedprism.types import Update


@dataclass(frozen=True)
class Prune(Defense):
    """Zeroes the smallest `ratio` of each tensor's entries by magnitude; of equal ones, those that come last go."""

    ratio: float

    def __post_init__(self) -> None:
        probability(self.ratio, "Prune's ratio")

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: prune(tensor, self.ratio) for name, tensor in update.items()}

    def deterministic(self, observed: Update | None = None) -> Defense:
        # The zeros tell which entries were kept; comparing these alone leaves a smooth objective.
        return self if observed is None else KeepSupport({name: tensor != 0 for name, tensor in observed.items()})


@dataclass(frozen=True)
class KeepSupport(Defense):
    """Keeps the entries of `support` and zeroes the others: pruning as an attacker can repeat it."""

    support: Mapping[str, Tensor]

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: tensor * self.support[name] for name, tensor in update.items() if name in self.support}


def prune(tensor: Tensor, ratio: float) -> Tensor:
    """Zero the floor(ratio * size) smallest entries by magnitude; of entries equal to the threshold the last go."""
    removed = int(ratio * tensor.numel())
    if removed == 0 or not tensor.dtype.is_floating_point:
        return tensor
    magnitude = tensor.detach().abs().flatten()
    count = magnitude.numel() - removed
    threshold = smallest_kept(magnitude, count)
    larger, tied = magnitude > threshold, magnitude == threshold
    # Counted on the device: asking how many are larger would make a GPU wait at every tensor.
    kept = larger | (tied & (tied.cumsum(0) <= count - larger.sum()))
    return tensor * kept.view_as(tensor)


def smallest_kept(magnitude: Tensor, count: int) -> Tensor:
    """The smallest of the `count` largest entries of a vector, a scalar; there is no limit on the vector's size."""
    if magnitude.is_cuda:  # kthvalue runs in one block of a GPU
        return magnitude.topk(count, sorted=False).values.amin()
    return magnitude.kthvalue(magnitude.numel() - count + 1).values
