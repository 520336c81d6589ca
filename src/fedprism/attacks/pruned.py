"""Pruning as an attacker can follow it: what was not sent is known to be smaller than what was.

Comparing the entries that were sent alone forgets this, comparing all of them with zero wants the others smaller than
they were. Here the true batch loses nothing, and the objective stays continuous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.defenses.base import Context, Defense
from fedprism.defenses.pruning import smallest_kept
from fedprism.types import Update


class FollowedPruning(Defense):
    """What takes the place of pruning in the forward model of an attacker who knows of it."""


@dataclass(frozen=True)
class SmallerThanSent(FollowedPruning):
    """An entry that was not sent counts by what it exceeds the smallest one that was.

    `sent` says which entries were sent, `smallest` how large the smallest of a tensor's is, as a share of the length
    of all that were: later parts of the defense may have scaled them.
    """

    sent: Update
    smallest: Update

    @classmethod
    def of(cls, observed: Update) -> SmallerThanSent:
        sent = {name: tensor != 0 for name, tensor in observed.items()}
        return cls(sent, {name: _smallest_share(tensor) for name, tensor in observed.items()})

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: self._compared(tensor, name) for name, tensor in update.items() if name in self.sent}

    def _compared(self, tensor: Tensor, name: str) -> Tensor:
        sent = self.sent[name]
        limit = self.smallest[name] * torch.linalg.vector_norm(tensor.detach() * sent)
        return torch.where(sent, tensor, tensor - tensor.clamp(-limit, limit))


@dataclass(frozen=True)
class SignsOfTheLargest(FollowedPruning):
    """The same where of the entries that were sent only the signs are left.

    These are all equally large, so that the smallest of them does not tell where pruning cut. How many were sent does:
    the guess is cut where as many of its own are larger. One that was sent counts up to there, for it may be as large
    as it likes; one that was not, by what it exceeds that. `kept` says how many of a tensor's entries were sent.
    """

    sent: Update
    kept: Mapping[str, int]

    @classmethod
    def of(cls, observed: Update) -> SignsOfTheLargest:
        sent = {name: tensor != 0 for name, tensor in observed.items()}
        return cls(sent, {name: int(entries.sum()) for name, entries in sent.items()})

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return {name: self._compared(tensor, name) for name, tensor in update.items() if name in self.sent}

    def _compared(self, tensor: Tensor, name: str) -> Tensor:
        sent, kept = self.sent[name], self.kept[name]
        if kept == 0:  # pruning always keeps an entry: all were zero
            return tensor
        cut = smallest_kept(tensor.detach().abs().flatten(), kept)
        inside = tensor.clamp(-cut, cut)
        scale = (tensor * sent).abs().sum() / (kept * torch.where(cut > 0, cut, 1.0))
        return torch.where(sent, inside * scale, tensor - inside)


def _smallest_share(tensor: Tensor) -> Tensor:
    """The smallest magnitude above zero over the length; 0 where all are zero, since pruning always keeps an entry."""
    magnitude = tensor.abs()
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin() / torch.linalg.vector_norm(tensor)
    return torch.where(smallest.isfinite(), smallest, 0.0)
