"""Pruning as an attacker can follow it: entries that were not sent are known to be smaller than those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.defenses.base import Context, Defense
from fedprism.defenses.pruning import smallest_kept
from fedprism.types import Update


@dataclass(frozen=True)
class FollowedPruning(Defense):
    """Takes the place of pruning in the forward model of an attacker who knows of it. sent: which entries were sent."""

    sent: Update

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: self.compared(tensor, name) for name, tensor in update.items() if name in self.sent}

    def compared(self, tensor: Tensor, name: str) -> Tensor:
        """What of a gradient is compared with the one that was sent."""
        raise NotImplementedError


@dataclass(frozen=True)
class SmallerThanSent(FollowedPruning):
    """An entry that was not sent counts by how far it exceeds the smallest one that was.

    smallest: of each tensor, over its length, because later parts of the defense may have scaled it.
    """

    smallest: Update

    @classmethod
    def of(cls, observed: Update) -> SmallerThanSent:
        sent = {name: tensor != 0 for name, tensor in observed.items()}
        return cls(sent, {name: _smallest_ratio(tensor) for name, tensor in observed.items()})

    def compared(self, tensor: Tensor, name: str) -> Tensor:
        sent = self.sent[name]
        limit = self.smallest[name] * torch.linalg.vector_norm(tensor.detach() * sent)
        return torch.where(sent, tensor, tensor - tensor.clamp(-limit, limit))


@dataclass(frozen=True)
class SignsOfTheLargest(FollowedPruning):
    """The same if only signs were sent: each guess is cut at its `kept` largest entries, as many as were sent."""

    kept: Mapping[str, int]

    @classmethod
    def of(cls, observed: Update) -> SignsOfTheLargest:
        sent = {name: tensor != 0 for name, tensor in observed.items()}
        return cls(sent, {name: int(entries.sum()) for name, entries in sent.items()})

    def compared(self, tensor: Tensor, name: str) -> Tensor:
        sent, kept = self.sent[name], self.kept[name]
        if kept == 0:  # pruning always keeps an entry: all were zero
            return tensor
        cut = smallest_kept(tensor.detach().abs().flatten(), kept)
        inside = tensor.clamp(-cut, cut)
        scale = (tensor * sent).abs().sum() / (kept * torch.where(cut > 0, cut, 1.0))
        return torch.where(sent, inside * scale, tensor - inside)


def _smallest_ratio(tensor: Tensor) -> Tensor:
    """The smallest magnitude above zero over the length; 0 where all are zero."""
    magnitude = tensor.abs()
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin() / torch.linalg.vector_norm(tensor)
    return torch.where(smallest.isfinite(), smallest, 0.0)
