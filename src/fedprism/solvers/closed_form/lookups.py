"""What was looked up in a table, out of the table's gradient: only rows that were used have one.

Row t of the gradient is the sum, over the places where t was looked up, of the errors that come back there. Where these
errors are known (a position parameter is added to the rows) the rows tell which place each was used at; where a sample
sends the same error to all of its places (their mean or sum is taken) they tell how often each sample used each row.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

NOISE_FLOOR = 1e-3
"""Length of what is left of a row, relative to the row, below which a row was not used: far above rounding."""
LARGEST_SHARE_USED = 0.5
"""Part of the rows that may be in use where the others have a gradient too, from decay or from a tied layer."""
SAME_DIRECTION = 1e-3
"""Sine of the angle between two rows that belong to the same sample: far above rounding."""
EQUAL = 1e-2
"""Distance between a row and an error, relative to the row, below which they are the same: above half precision's."""
HALF = 0.5
"""What a share that is 0 or 1 but for rounding is rounded at."""
MOST_CHOICES = 1_000
"""Choices of one row a sample that are tried: the largest groups of rows are the likeliest, and come first."""
WHOLE = 0.05
"""How far from a whole number a count may be."""


class Used(NamedTuple):
    rows: Tensor
    """(used,) numbers of the rows that were used."""
    gradients: Tensor
    """(used, width) what the lookups gave them, in double precision."""


def used_rows(gradient: Tensor, parameter: Tensor | None = None, lookups: int | None = None) -> Used | None:
    """The rows that were used; None where more rows have a gradient than can have been used.

    Weight decay adds a multiple of the `parameter`; an output layer that shares the table adds to all rows something
    from a space of few dimensions. `lookups`: how many were made, the most rows that can be in use.
    """
    gradient = gradient.double()
    lengths = gradient.norm(dim=1)
    used = lengths.nonzero().flatten()
    if len(used) < len(gradient) if lookups is None else len(used) <= lookups:
        return Used(used, gradient[used])
    most = min(lookups or len(gradient), int(LARGEST_SHARE_USED * len(gradient)))
    if parameter is not None:
        without, used = _without_decay(gradient, parameter.double())
        if len(used) <= most:
            return Used(used, without[used])
    without, used = _without_few_directions(gradient, lengths)
    return Used(used, without[used]) if len(used) <= most else None


def _without_decay(gradient: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    factors = (gradient * parameter).sum(1) / parameter.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    decay = factors.median() * parameter
    without = gradient - decay
    return without, (without.norm(dim=1) > NOISE_FLOOR * decay.norm(dim=1)).nonzero().flatten()


def _without_few_directions(gradient: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Take out the space that the shorter half of the rows spans: what was used has longer rows."""
    shorter = lengths.argsort()[: len(lengths) // 2]
    rows = gradient[shorter]
    _, sizes, directions = torch.linalg.svd(rows / lengths[shorter, None].clamp_min(1e-300), full_matrices=False)
    rank = int((sizes > sizes[0] * math.sqrt(len(rows)) * torch.finfo(torch.float32).eps).sum())
    if rank >= gradient.shape[1]:
        return gradient, torch.arange(len(gradient))
    space = directions[:rank]
    without = gradient - gradient @ space.T @ space
    return without, (without.norm(dim=1) > NOISE_FLOOR * lengths).nonzero().flatten()


def places_of_rows(rows: Tensor, errors: Tensor) -> tuple[Tensor, float] | None:
    """Which of the rows (used, width) was looked up at each place, from the errors (places, width) of the places.

    Also the part of the rows' gradient that is left unexplained; None where the errors do not tell the places apart.
    A row that was used once has the error of its place. Every other is the sum of those of its places, so the shares
    are solved for and must come out as 0 and 1.
    """
    rows, errors = rows.double(), errors.double()
    active = errors.norm(dim=1) > NOISE_FLOOR * errors.norm(dim=1).max()
    apart = torch.cdist(errors, rows) / rows.norm(dim=1)
    once = active & (apart.amin(1) < EQUAL)
    places = torch.where(once, apart.argmin(1), -1)
    open_places = (active & ~once).nonzero().flatten()
    explained = torch.zeros_like(rows).index_add_(0, places[once], errors[once])
    if len(open_places) > errors.shape[1]:
        return None
    if len(open_places):
        shares = torch.linalg.lstsq(errors[open_places].T, (rows - explained).T).solution.T  # (used, open places)
        shared = open_places[shares.amax(0) > HALF]  # at other places something stands that has no row: padding
        places[shared] = shares.argmax(0)[shares.amax(0) > HALF]
        explained.index_add_(0, places[shared], errors[shared])
    return places, float((rows - explained).norm() / rows.norm())


def counts_of_samples(rows: Tensor, length: int | None = None, samples: int | None = None) -> Tensor | None:
    """How often each sample used each row, (samples, used) whole numbers; None where the rows do not tell.

    For networks that give every place of a sample the same error. Every sample needs a row that no other sample uses:
    such rows point in the direction of the sample's error, all others are combinations of these. `length`: how many
    lookups a sample makes; without it the smallest count is taken for one. `samples`: how many there are; without it
    rows have to repeat directions.
    """
    rows = rows.double() / rows.abs().max()
    directions = torch.nn.functional.normalize(rows, dim=1)
    groups = _groups(directions)
    rank = int(torch.linalg.matrix_rank(directions, rtol=SAME_DIRECTION))
    if rank != samples if samples is not None else rank == len(rows):
        return None
    for chosen in itertools.islice(itertools.combinations(groups[: 2 * rank], rank), MOST_CHOICES):
        rays = torch.stack([directions[group[0]] for group in chosen])
        amounts = torch.linalg.lstsq(rays.T, rows.T).solution  # (samples, used)
        if bool((amounts < -SAME_DIRECTION * amounts.abs().amax(1, keepdim=True)).any()):
            continue
        units = amounts.sum(1) / length if length is not None else _smallest(amounts)
        counts = amounts / units[:, None]
        whole = counts.round()
        if bool(((counts - whole).abs() <= WHOLE).all()) and torch.allclose(
            rays.T @ amounts, rows.T, atol=SAME_DIRECTION
        ):
            counted: Tensor = whole.long()
            return counted
    return None


def _groups(directions: Tensor) -> list[list[int]]:
    """Rows that point the same way, the largest groups first."""
    left, groups = list(range(len(directions))), []
    while left:
        first = directions[left[0]]
        apart = (directions[left] - (directions[left] @ first)[:, None] * first).norm(dim=1)
        together = (apart < SAME_DIRECTION) & (directions[left] @ first > 0)
        groups.append([row for row, inside in zip(left, together.tolist(), strict=True) if inside])
        left = [row for row, inside in zip(left, together.tolist(), strict=True) if not inside]
    return sorted(groups, key=len, reverse=True)


def _smallest(amounts: Tensor) -> Tensor:
    smallest: Tensor = amounts.where(amounts > WHOLE * amounts.amax(1, keepdim=True), math.inf).amin(1)
    return smallest
