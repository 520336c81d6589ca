"""How well a column explains the sums, and whether a column that differs by one exchange does nearly as well."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.subspace import SignalSpace

ROUNDING = 1e-6
"""Residual a round that rounding in the solvers themselves may leave in a right column."""
TAIL = 6.0
"""Standard deviations by which a right column's squared residual may exceed its mean."""
SLACK = 2.0
"""Factor on the squared residual for noise that is not as even as the model has it."""
CLEARLY = 30.0
"""By how much every exchange must raise the squared residual, in variances of one equation: the log-likelihood then
falls by half of that, enough for thousands of possible exchanges."""
AT_ONCE = 1 << 24
"""Pairs of rounds that are looked at together: 128 MiB."""
MOST_FLIPS = 40
"""Single rounds of a column that are corrected, one after the other."""
NEAR = 0.5
"""Squared residual, relative to a random column's, up to which single rounds are corrected."""
LONG_TILE = 256
"""Rounds of a tile up to which all pairs are compared, and rounds that are paired in longer ones."""
MOST_EXCHANGES = 100
"""Exchanges after which a column is as polished as it gets."""
WORTHWHILE = 1e-9
"""Decrease of the squared residual that is more than rounding error."""


class Exchange(NamedTuple):
    """The best column that differs in one pair of rounds of a tile, or in one round where the count leaves room."""

    change: Tensor
    """(users,): of the squared residual."""
    columns: Tensor


class Evidence:
    """What the sums say about columns (users, rounds)."""

    def __init__(self, space: SignalSpace) -> None:
        self.space = space
        equations = space.equations
        self._quantile = SLACK * (equations + TAIL * math.sqrt(2 * equations))
        self._rounding = ROUNDING * math.sqrt(len(space.signal))
        # The Gram matrix of the equations, which would grow with the square of the rounds, is diag(weights²) - A Aᵀ.
        self._inside = space.weights[:, None] * space.signal
        self._squares = space.weights.square()
        self._spread = float(torch.linalg.matrix_norm(space.spread, 2)) if space.spread.numel() else 0.0

    def residual(self, columns: Tensor) -> Tensor:
        """(users,): length of what the columns have outside the space of the sums."""
        lengths: Tensor = self.space.outside(columns).norm(dim=1)
        return lengths

    def allowed(self, columns: Tensor) -> Tensor:
        """(users,): largest residual of right columns; its square is a sum of squares of normal variables."""
        return (self._quantile * self.variance(columns)).sqrt() + self._rounding

    def allowed_at_most(self, ones: Tensor) -> Tensor:
        """(users,): the largest residual of any column with that many ones."""
        return math.sqrt(self._quantile) * self._spread * ones.double().sqrt() + self._rounding

    def explains(self, columns: Tensor, known: Analytics) -> Tensor:
        """(users,): whether noise explains what the columns leave over, and all that is known is kept."""
        return self.within_noise(columns) & known.satisfied(columns)

    def within_noise(self, columns: Tensor) -> Tensor:
        """(users,): whether noise explains what the columns leave over."""
        return self.residual(columns) <= self.allowed(columns)

    def of_random(self, columns: Tensor) -> Tensor:
        """(users,): squared residual to be expected of random columns with as many ones."""
        live = ~self.space.silent
        least = 0.5 / int(live.sum())  # of a column that is the same everywhere there is a little to be seen, too
        share = columns[:, live].double().mean(1).clamp(least, 1 - least)
        return (share * (1 - share) * self._squares[live].mean() * self.space.equations).clamp(min=1e-300)

    def accepts(self, columns: Tensor, known: Analytics) -> Tensor:
        """(users,): whether the columns explain the sums and no exchange does nearly as well."""
        accepted = self.explains(columns, known)
        chosen = accepted.nonzero()[:, 0]
        if len(chosen):
            exchange = self.best_exchange(columns[chosen], known.of(chosen))
            accepted[chosen] = exchange.change > CLEARLY * self.variance(columns[chosen])
        return accepted

    def variance(self, columns: Tensor) -> Tensor:
        """(users,): what noise leaves of right columns in each equation, squared."""
        return (columns.double() @ self.space.spread).square().sum(1)

    def flip_changes(self, columns: Tensor) -> Tensor:
        """(users, rounds): by how much the squared residual changes if this one round is flipped."""
        itself = self._squares - self._inside.square().sum(1)
        return itself + (2 - 4 * columns.double()) * self._pull(columns)

    def corrected(self, columns: Tensor) -> Tensor:
        """Columns after the best flips of single rounds, one after the other, where they are near the space already."""
        columns = columns.clone()
        moving = (self.residual(columns).square() < NEAR * self.of_random(columns)).nonzero()[:, 0]
        for _ in range(MOST_FLIPS):
            change, place = self.flip_changes(columns[moving]).min(1) if len(moving) else (columns, columns)
            better = change < -WORTHWHILE
            if not bool(better.any()):
                break
            moving, place = moving[better], place[better]
            columns[moving, place] = ~columns[moving, place]
        return columns

    def undecided_rounds(self, columns: Tensor) -> Tensor:
        """(users,): in how many rounds a column may be wrong before noise no longer explains its residual."""
        live = ~self.space.silent
        cost = (self._squares - self._inside.square().sum(1))[live].mean()
        return self.allowed(columns).square() / cost.clamp(min=1e-300)

    def _pull(self, columns: Tensor) -> Tensor:
        """(users, rounds): the columns times the Gram matrix of the equations."""
        values = columns.double()
        return self._squares * values - (values @ self._inside) @ self._inside.T

    def best_exchange(self, columns: Tensor, known: Analytics) -> Exchange:
        tiles, length = known.tiles.shape
        size = max(1, AT_ONCE // (tiles * min(length, LONG_TILE) ** 2))
        exchanges = [
            self._best_exchange(columns[rows], known.of(rows))
            for rows in torch.split(torch.arange(len(columns), device=columns.device), size)
        ]
        return Exchange(torch.cat([e.change for e in exchanges]), torch.cat([e.columns for e in exchanges]))

    def _best_exchange(self, columns: Tensor, known: Analytics) -> Exchange:
        change = self.flip_changes(columns)
        free = known.fixed < 0
        leaving = torch.where(columns & free, change, torch.inf)
        joining = torch.where(~columns & free, change, torch.inf)
        out, into, best = self._best_pair(leaving, joining, known)
        swapped = columns.clone()
        who = torch.arange(len(columns), device=columns.device)
        possible = torch.isfinite(best)
        swapped[who[possible], out[possible]] = False
        swapped[who[possible], into[possible]] = True
        if known.exact:
            return Exchange(best, swapped)
        return self._or_flip(Exchange(best, swapped), columns, known, leaving, joining)

    def _best_pair(self, leaving: Tensor, joining: Tensor, known: Analytics) -> tuple[Tensor, Tensor, Tensor]:
        """(users,): which round to leave, which to join in the same tile, and what that changes.

        Of long tiles only the rounds are paired that are best on their own: what a pair has in common is small.
        """
        rounds = leaving.shape[1]
        leaves, joins = known.tiled(leaving, torch.inf), known.tiled(joining, torch.inf)
        inside = torch.nn.functional.pad(self._inside, (0, 0, 0, 1))
        tiles = known.tiles.expand(len(leaving), -1, -1)
        if known.tiles.shape[1] <= LONG_TILE:
            rows = inside[known.tiles]
            overlap = -rows @ rows.mT  # (tiles, length, length)
        else:
            leaves, first = leaves.topk(LONG_TILE, dim=-1, largest=False)
            joins, second = joins.topk(LONG_TILE, dim=-1, largest=False)
            out, into = tiles.gather(-1, first), tiles.gather(-1, second)
            overlap = -inside[out] @ inside[into].mT
        change = (leaves[..., :, None] + joins[..., None, :] - 2 * overlap).flatten(1)
        best, place = change.min(1)
        length = leaves.shape[-1]
        tile, pair = place // length**2, place % length**2
        who = torch.arange(len(leaving), device=leaving.device)
        if known.tiles.shape[1] <= LONG_TILE:
            out = into = tiles
        chosen = (
            out[who, tile, pair // length].clamp(max=rounds - 1),
            into[who, tile, pair % length].clamp(max=rounds - 1),
        )
        return *chosen, best

    def _or_flip(
        self, exchange: Exchange, columns: Tensor, known: Analytics, leaving: Tensor, joining: Tensor
    ) -> Exchange:
        """The exchange, or a single round more or less where that is better and the tile's count allows it."""
        counts = known.tiled(columns, False).sum(-1)
        length = known.tiles.shape[1]
        fewer = known.untiled((counts > known.tile_least)[..., None].expand(-1, -1, length))
        more = known.untiled((counts < known.tile_most)[..., None].expand(-1, -1, length))
        change = torch.minimum(torch.where(fewer, leaving, torch.inf), torch.where(more, joining, torch.inf))
        best, place = change.min(1)
        better = best < exchange.change
        flipped = columns.clone()
        flipped.scatter_(1, place[:, None], ~columns.gather(1, place[:, None]))
        return Exchange(torch.minimum(best, exchange.change), torch.where(better[:, None], flipped, exchange.columns))

    def polished(self, columns: Tensor, known: Analytics) -> Tensor:
        """The columns after the best exchanges, one after the other, as long as they lower the residual."""
        columns = columns.clone()
        moving = torch.arange(len(columns), device=columns.device)
        for _ in range(MOST_EXCHANGES):
            exchange = self.best_exchange(columns[moving], known.of(moving))
            lower = exchange.change < -WORTHWHILE
            moving = moving[lower]
            if not len(moving):
                break
            columns[moving] = exchange.columns[lower]
        return columns
