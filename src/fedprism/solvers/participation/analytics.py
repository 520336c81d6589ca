"""Device analytics: how often each user took part in windows of rounds, checked and brought into one form.

Inside the solvers users are rows: columns of the participation matrix are kept as (users, rounds).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.contradictions import check_agreement, disagreement

FAR = 1e4
"""What stands for a known entry among values that are rounded at one half."""
MOST_NESTED = 512
"""Windows beyond which differences of nested ones are not looked for: the pairs grow with the square."""
USUAL_TILE = 10
"""Rounds of a tile where no window says how long one is."""


class Analytics(NamedTuple):
    """What is known of each user beside the sums. Everything a column must satisfy is in the first four fields.

    `tiles` (tiles, length) are disjoint windows that cover all rounds, for the solvers that look at one window at a
    time: entries are rounds, or `rounds` where a tile is shorter.
    """

    windows: Tensor
    """(windows, rounds), 0 or 1."""
    least: Tensor
    """(users, windows): the smallest count allowed, 0 where it is unknown."""
    most: Tensor
    """(users, windows): the largest count allowed, the window's length where it is unknown."""
    fixed: Tensor
    """(users, rounds): 0 or 1 where an entry is known, else -1."""
    tiles: Tensor
    tile_least: Tensor
    tile_most: Tensor
    rate: Tensor
    """(users,): the fraction of rounds a user took part in, as far as counts tell."""
    tile_weights: Tensor | None = None
    """(users, tiles, counts): log-likelihood of every count, where counts are under noise."""

    @property
    def rounds(self) -> int:
        return self.windows.shape[1]

    @property
    def informed(self) -> Tensor:
        """(users,): whether anything at all is known of a user beside the sums."""
        lengths = self.windows.sum(1)
        counted = ((self.least > 0) | (self.most < lengths)).any(1)
        return counted | (self.fixed == 1).any(1)

    @property
    def exact(self) -> bool:
        """Whether every tile's count is known exactly for every user."""
        return bool((self.tile_least == self.tile_most).all())

    def of(self, users: Tensor) -> Analytics:
        """The same for some of the users."""
        fields = ("least", "most", "fixed", "tile_least", "tile_most", "rate")
        weights = None if self.tile_weights is None else self.tile_weights[users]
        return self._replace(**{name: getattr(self, name)[users] for name in fields}, tile_weights=weights)

    def tiled(self, values: Tensor, filler: float) -> Tensor:
        """(users, rounds) -> (users, tiles, length)."""
        padded = torch.cat([values, values.new_full((len(values), 1), filler)], 1)
        return padded[:, self.tiles]

    def untiled(self, values: Tensor) -> Tensor:
        """(users, tiles, length) -> (users, rounds)."""
        flat = values.new_empty(len(values), self.rounds + 1)
        flat[:, self.tiles.flatten()] = values.flatten(1)
        return flat[:, :-1]

    def nearest_columns(self, values: Tensor) -> Tensor:
        """The columns (users, rounds) of zeros and ones nearest to `values` that keep the tiles' counts.

        In every tile the largest values become ones: those over one half, but no fewer and no more than counted.
        """
        values = torch.where(self.fixed == 0, -FAR, torch.where(self.fixed == 1, FAR, values))
        tiled = self.tiled(values, -torch.inf)
        order = tiled.sort(dim=-1, descending=True, stable=True).indices
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        ranks = torch.empty_like(order).scatter_(-1, order, places)
        wanted = (tiled > 0.5).sum(-1)
        wanted = torch.minimum(torch.maximum(wanted, self.tile_least), self.tile_most)
        return self.untiled(ranks < wanted[..., None])

    def satisfied(self, columns: Tensor) -> Tensor:
        """(users,): whether the columns (users, rounds) keep every count and every known entry."""
        sums = columns.to(torch.float64) @ self.windows.T.to(torch.float64)
        counted = ((sums >= self.least) & (sums <= self.most)).all(1)
        return counted & ((self.fixed < 0) | (self.fixed == columns)).all(1)


def read_analytics(windows: Tensor, counts: Tensor, known: Tensor | None, silent: Tensor, tolerance: int) -> Analytics:
    """Check what is known and bring it into one form. A contradiction is a ValueError that names user and window.

    windows (windows, rounds); counts (users, windows), NaN or -1 where unknown, each right up to `tolerance`;
    known (rounds, users) with 0, 1, and NaN or -1 where unknown; silent (rounds,): the sum is zero, so that nobody took
    part, or nobody who sends anything but zeros: a user whose counts do not allow for the first is taken at its counts.
    """
    windows, counts = _checked(windows, counts, len(silent))
    device = silent.device
    users, rounds = len(counts), len(silent)
    lengths = windows.sum(1)
    unknown = torch.isnan(counts) | (counts < 0)
    least = torch.where(unknown, 0, (counts - tolerance).clamp(min=0)).to(torch.int64)
    most = torch.where(unknown, lengths, torch.minimum(counts + tolerance, lengths)).to(torch.int64)
    too_many = ~unknown & (counts - tolerance > lengths)
    if bool(too_many.any()):
        user, window = (int(i) for i in too_many.nonzero()[0])
        raise ValueError(
            f"no count can be larger than its window, but user {user} counted {int(counts[user, window])} times in "
            f"window {window} of {int(lengths[window])} rounds. Check the counts."
        )
    fixed = _silenced(windows, least, _known_entries(known, users, silent), silent)
    fixed = _propagated(windows, least, most, fixed)
    check_agreement(windows, least, most, fixed)
    windows, least, most = _with_differences(windows, least, most)
    fixed = _propagated(windows, least, most, fixed)
    tiles, chosen = _tiling(windows, least, most)
    sizes = (tiles < rounds).sum(1)
    tile_least = torch.zeros(users, len(tiles), dtype=torch.int64, device=device)
    tile_most = sizes.expand(users, -1).clone()
    tile_least[:, : len(chosen)], tile_most[:, : len(chosen)] = least[:, chosen], most[:, chosen]
    return Analytics(windows, least, most, fixed, tiles, tile_least, tile_most, _rates(tile_least, tile_most, sizes))


def unknown_users(users: int, like: Analytics) -> Analytics:
    """Of so many users nothing is known; silent rounds are those of `like`."""
    silent = (like.fixed == 0).all(0)
    windows = torch.zeros(0, like.rounds, dtype=torch.float64, device=silent.device)
    return read_analytics(windows, windows.new_zeros(users, 0), None, silent, 0)


def _checked(windows: Tensor, counts: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    if windows.dim() != 2 or windows.shape[1] != rounds or not bool(((windows == 0) | (windows == 1)).all()):
        raise ValueError(
            f"windows must be a matrix (windows, rounds) of zeros and ones over {rounds} rounds, but it has shape "
            f"{tuple(windows.shape)} or other values. Give one row per window."
        )
    if counts.dim() != 2 or counts.shape[1] != len(windows):
        raise ValueError(
            f"counts must be a matrix (users, windows) for {len(windows)} windows, but it has shape "
            f"{tuple(counts.shape)}. Give one row per user."
        )
    counts = counts.to(torch.float64)
    odd = torch.isinf(counts) | (counts < -1) | (torch.isfinite(counts) & (counts != counts.round()))
    if bool(odd.any()):
        user, window = (int(i) for i in odd.nonzero()[0])
        raise ValueError(
            "counts must be whole numbers, or NaN or -1 if unknown, "
            f"not {float(counts[user, window]):g} for user {user} in window {window}."
        )
    return windows.to(torch.float64), counts


def _known_entries(known: Tensor | None, users: int, silent: Tensor) -> Tensor:
    """(users, rounds): 0 or 1 where `known` (rounds, users) says so, else -1."""
    if known is None:
        return torch.full((users, len(silent)), -1, dtype=torch.int64, device=silent.device)
    entries = known.T.to(silent.device, torch.float64)
    unknown = torch.isnan(entries) | (entries == -1)
    if entries.shape != (users, len(silent)) or not bool((unknown | (entries == 0) | (entries == 1)).all()):
        raise ValueError(
            f"known must be a matrix (rounds, users) of shape ({len(silent)}, {users}) of 0, 1, -1 and NaN, "
            f"but it has shape {tuple(known.shape)} or other values."
        )
    return torch.where(unknown, -1, entries).to(torch.int64)


def _silenced(windows: Tensor, least: Tensor, fixed: Tensor, silent: Tensor) -> Tensor:
    """What is fixed, with zeros in silent rounds where the user's counts allow for that."""
    quiet = torch.where(silent & (fixed < 0), 0, fixed)
    possible = ((quiet != 0).to(torch.float64) @ windows.T >= least).all(1)
    return torch.where(possible[:, None], quiet, fixed)


def _with_differences(windows: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The windows and what nested ones leave of each other: running totals become windows."""
    if not 0 < len(windows) <= MOST_NESTED:
        return windows, least, most
    present = {tuple(row) for row in windows.bool().tolist()}
    for outer, inner in _nested_pairs(windows):
        if tuple((windows[outer] - windows[inner]).bool().tolist()) in present:
            continue
        windows = torch.cat([windows, (windows[outer] - windows[inner])[None]])
        least = torch.cat([least, (least[:, outer] - most[:, inner]).clamp(min=0)[:, None]], 1)
        length = int(windows[-1].sum())
        most = torch.cat([most, (most[:, outer] - least[:, inner]).clamp(max=length)[:, None]], 1)
    return windows, least, most


def _nested_pairs(windows: Tensor) -> list[tuple[int, int]]:
    """Pairs (outer, inner) where inner is the largest window strictly inside outer."""
    lengths = windows.sum(1)
    shared = windows @ windows.T
    inside = (shared == lengths) & (lengths[:, None] > lengths) & (lengths > 0)  # [outer, inner]
    size = torch.where(inside, lengths, 0)
    best = size.argmax(1)
    return [(outer, int(best[outer])) for outer in inside.any(1).nonzero()[:, 0].tolist()]


def _propagated(windows: Tensor, least: Tensor, most: Tensor, fixed: Tensor) -> Tensor:
    """Entries that counts leave no choice about, until nothing changes. Contradictions are raised."""
    while True:
        ones = (fixed == 1).to(torch.float64) @ windows.T
        free = (fixed < 0).to(torch.float64) @ windows.T
        wrong = (ones > most) | (ones + free < least)
        if bool(wrong.any()):
            user, window = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(disagreement(user, window, int(least[user, window]), int(most[user, window])))
        absent = ((ones == most) & (free > 0)).to(torch.float64) @ windows > 0
        present = ((ones + free == least) & (free > 0)).to(torch.float64) @ windows > 0
        decided = torch.where(absent & (fixed < 0), 0, fixed)
        decided = torch.where(present & (fixed < 0), 1, decided)
        if torch.equal(decided, fixed):
            return fixed
        fixed = decided


def _tiling(windows: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, list[int]]:
    """Disjoint windows, short and well-known ones first, and the rounds they leave over as tiles without a count."""
    rounds = windows.shape[1]
    vague = (most - least).to(torch.float64).mean(0) / windows.sum(1).clamp(min=1)
    length = windows.sum(1)
    free = torch.ones(rounds, dtype=torch.bool, device=windows.device)
    chosen: list[int] = []
    members: list[Tensor] = []
    for number in sorted(range(len(windows)), key=lambda w: (round(float(vague[w]), 6), float(length[w]), w)):
        inside = windows[number] > 0
        if bool(inside.any()) and float(vague[number]) < 1 and bool(free[inside].all()):
            chosen.append(number)
            members.append(inside.nonzero()[:, 0])
            free &= ~inside
    if bool(free.any()):
        members += torch.split(free.nonzero()[:, 0], max(map(len, members), default=USUAL_TILE))
    longest = max(map(len, members))
    tiles = torch.full((len(members), longest), rounds, dtype=torch.int64, device=windows.device)
    for row, rows in zip(tiles, members, strict=True):
        row[: len(rows)] = rows
    return tiles, chosen


def _rates(least: Tensor, most: Tensor, sizes: Tensor) -> Tensor:
    """Each user's rate of participation: from the tiles it is counted in, or of all users where it is in none."""
    counted = most - least < sizes
    rounds = (counted * sizes).sum(1)
    total = (counted * (least + most) / 2).sum(1)
    everyone = float(total.sum() / rounds.sum()) if float(rounds.sum()) > 0 else 0.5
    return (total + everyone) / (rounds + 1)
