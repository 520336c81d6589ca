"""What counts say of a user, in probabilities: exact, missing, bounded or under noise, in one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.naming import IMPOSSIBLE, log_binomial

CountLikelihood: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(reported, true) counts -> log-likelihood of the report, up to a term that is the same for all true counts."""
LEAST_RATE = 0.01
"""Bound on the rate that counts under noise give a user, from 0 and from 1."""


class SoftCounts:
    """Counts under noise: reported (users, windows), NaN where unknown, and how likely a report is."""

    def __init__(self, windows: Tensor, reported: Tensor, likelihood: CountLikelihood) -> None:
        self.windows, self.reported, self.lengths = windows.double(), reported.double(), windows.double().sum(1)
        self._likelihood = likelihood
        self._known = torch.isfinite(self.reported)

    def agreement(self, columns: Tensor) -> Tensor:
        """(users, columns): log-likelihood of each user's reports if a column (columns, rounds) is its own."""
        true = columns.double() @ self.windows.T
        return torch.stack(
            [self._total(row, known, true) for row, known in zip(self.reported, self._known, strict=True)]
        )

    def _total(self, reports: Tensor, known: Tensor, true: Tensor) -> Tensor:
        if not bool(known.any()):
            return true.new_zeros(len(true))
        return self._likelihood(reports[known], true[:, known]).double().clamp(min=IMPOSSIBLE).sum(1)

    def by_chance(self, rate: float) -> Tensor:
        """(users,): log-likelihood of each user's reports if its column is any at this rate."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        true = torch.arange(longest + 1, dtype=torch.float64, device=self.windows.device)
        chances = self.reported.new_zeros(len(self.reported))
        for window, length in enumerate(self.lengths):
            possible = true[: int(length) + 1]
            prior = log_binomial(possible, length.expand(len(possible)), rate)
            reports = self.reported[:, window, None]
            each = (self._likelihood(reports, possible).double().clamp(min=IMPOSSIBLE) + prior).logsumexp(1)
            chances += torch.where(self._known[:, window], each, 0.0)
        return chances

    def rates(self) -> Tensor:
        """(users,): each user's rate of participation, as far as the reports tell; that of all users where they do
        not."""
        seen = torch.where(self._known, self.reported, 0.0).sum(1)
        rounds = (self._known * self.lengths).sum(1)
        everyone = float(seen.sum() / rounds.sum()) if float(rounds.sum()) > 0 else 0.5
        return ((seen + everyone) / (rounds + 1)).clamp(LEAST_RATE, 1 - LEAST_RATE)

    def into(self, known: Analytics) -> Analytics:
        """The same knowledge with the likelihood of every count in the tiles that are windows."""
        length = known.tiles.shape[1]
        weights = self.reported.new_zeros(len(self.reported), len(known.tiles), length + 1)
        true = torch.arange(length + 1, dtype=torch.float64, device=self.windows.device)
        members = torch.nn.functional.one_hot(known.tiles, known.rounds + 1).sum(1)[:, :-1].double()
        for tile, rounds in enumerate(members):
            same = (self.windows == rounds).all(1).nonzero()[:, 0]
            for window in same.tolist():
                each = self._likelihood(self.reported[:, window, None], true).double().clamp(min=IMPOSSIBLE)
                weights[:, tile] += torch.where(self._known[:, window, None], each, 0.0)
        return known._replace(tile_weights=weights, rate=self.rates())


def agreement_with_limits(known: Analytics, columns: Tensor) -> Tensor:
    """(users, columns): 0 where a column keeps everything that is known of a user, else a very small number."""
    sums = columns.double() @ known.windows.T
    rows = []
    for user in range(len(known.fixed)):
        fits = ((sums >= known.least[user]) & (sums <= known.most[user])).all(1)
        fixed = known.fixed[user] >= 0
        fits &= (columns[:, fixed] == (known.fixed[user, fixed] == 1)).all(1)
        rows.append(torch.where(fits, 0.0, IMPOSSIBLE).double())
    return torch.stack(rows)


def limits_by_chance(known: Analytics, rate: float) -> Tensor:
    """(users,): log-probability that any column at this rate keeps a user's counts in the tiles."""
    lengths = (known.tiles < known.rounds).sum(1).double()
    chances = torch.zeros(len(known.fixed), dtype=torch.float64, device=known.windows.device)
    for tile, length in enumerate(lengths):
        counts = torch.arange(int(length) + 1, dtype=torch.float64, device=lengths.device)
        each = log_binomial(counts, length.expand(len(counts)), rate)
        inside = (counts >= known.tile_least[:, tile, None]) & (counts <= known.tile_most[:, tile, None])
        chances += torch.where(inside, each, -torch.inf).logsumexp(1)
    return chances
