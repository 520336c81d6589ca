"""What was looked up in a table, out of the table's gradient: only rows that were used have one.

Row t of the gradient is the sum, over the places where t was looked up, of the errors that come back there. Where these
errors are known (a position parameter is added to the rows) the rows tell which place each was used at; where a sample
sends the same error to all of its places (their mean or sum is taken) they tell how often each sample used each row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import nnls
from torch import Tensor

from fedprism.solvers.separation.mixture import sent_as

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
MOST_NOISE = 0.05
"""Errors relative to what is taken out of a gradient above which there is no telling what is left."""
FLOAT32 = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float64).tiny
WHOLE = 0.05
"""How far from a whole number a count may be."""
ROUNDED = 4.0
"""Rounding errors of an entry, in units of its number format's precision, that differences of rows may hold."""
LEVELLED = 0.9
"""Part of the entries that are equally large if an optimizer divided each by its size, as Adam's first step does."""


class Used(NamedTuple):
    rows: Tensor
    """(used,) numbers of the rows that were used."""
    gradients: Tensor
    """(used, width) what the lookups gave them, in double precision."""
    rounding: float = 0.0
    """Relative error of the gradients by the number format that they were sent in."""


def used_rows(
    gradient: Tensor, parameter: Tensor | None = None, lookups: int | None = None, *, difference: bool = False
) -> Used | None:
    """The rows that were used; None where more rows have a gradient than can have been used.

    Weight decay adds a multiple of the `parameter`; an output layer that shares the table adds to all rows something
    from a space of few dimensions. `lookups`: how many were made, the most rows that can be in use. `difference`:
    whether the gradient is a difference of two parameters, whose rounding errors it has.
    """
    rounding = ROUNDED * torch.finfo(sent_as(gradient) or gradient.dtype).eps
    gradient = gradient.double()
    lengths = gradient.norm(dim=1)
    used = lengths.nonzero().flatten()
    if len(used) < len(gradient) if lookups is None else len(used) <= lookups:
        return Used(used, gradient[used], rounding)
    most = min(lookups or len(gradient), int(LARGEST_SHARE_USED * len(gradient)))
    # Errors of a row are in proportion to itself, or to the parameters whose difference it is.
    errors = rounding * lengths if parameter is None or not difference else parameter.double().norm(dim=1)
    least = 0.0 if difference else 1.0
    if parameter is not None:
        without, used = _without_decay(gradient, parameter.double(), errors, least)
        if len(used) <= most:
            return Used(used, without[used], rounding)
    without, used = _without_few_directions(gradient, errors, least)
    return Used(used, without[used], rounding) if len(used) <= most else None


def _without_decay(gradient: Tensor, parameter: Tensor, errors: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Take out a multiple of the parameter: more than half of the rows, which were not used, are nothing else."""
    factors = (gradient * parameter).sum(1) / parameter.square().sum(1).clamp_min(TINY)
    decay = factors.median() * parameter
    without, lengths = gradient - decay, decay.norm(dim=1)
    left = without.norm(dim=1)
    noise = max(least, ROUNDED * float((left / errors.clamp_min(TINY)).median()))
    if float((noise * errors).median()) > MOST_NOISE * float(lengths.median()):
        return gradient, torch.arange(len(gradient))
    return without, (left > torch.maximum(NOISE_FLOOR * lengths, noise * errors)).nonzero().flatten()


def _without_few_directions(gradient: Tensor, errors: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Take out the space that the shorter half of the rows spans: what was used has longer rows.

    `errors` (rows,): how large errors of the rows are among each other, and at `least` that many times larger; the
    weakest direction tells how large they are.
    """
    lengths, everything = gradient.norm(dim=1), torch.arange(len(gradient))
    present = ((lengths > 0) & (errors > 0)).nonzero().flatten()
    shorter = present[lengths[present].argsort()[: len(present) // 2]]
    width = gradient.shape[1]
    if len(shorter) <= width:
        return gradient, everything
    _, sizes, directions = torch.linalg.svd(gradient[shorter] / errors[shorter, None], full_matrices=False)
    roots = math.sqrt(len(shorter)), math.sqrt(width)
    # White noise's singular values lie between the difference and the sum of these roots.
    spread = (roots[0] + roots[1]) / (roots[0] - roots[1])
    noise = max(roots[0] * least / ROUNDED, roots[0] * float(sizes[0]) * FLOAT32, spread * float(sizes[-1]))
    rank = int((sizes > noise).sum())
    if rank >= width or noise > MOST_NOISE * float(sizes[0]):
        return gradient, everything
    space = directions[:rank]
    without = gradient - gradient @ space.T @ space
    left = without.norm(dim=1)
    typical = max(least, ROUNDED * float((left[shorter] / errors[shorter]).median()))
    return without, (left > torch.maximum(NOISE_FLOOR * lengths, typical * errors)).nonzero().flatten()


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


def counts_of_samples(
    rows: Tensor, length: int | None = None, samples: int | None = None, rounding: float = 0.0
) -> Tensor | None:
    """How often each sample used each row, (samples, used) whole numbers; None where the rows do not tell.

    For networks that give every place of a sample the same error. Every sample needs a row that no other sample uses:
    such rows point in the direction of the sample's error, all others are combinations of these. `length`: how many
    lookups a sample makes; without it the smallest count is taken for one. `samples`: how many there are; without it
    rows have to repeat directions. `rounding`: the relative error of the rows.
    """
    if _levelled(rows):
        return None
    rows, tolerance = rows.double() / rows.abs().max(), max(SAME_DIRECTION, rounding)
    directions = torch.nn.functional.normalize(rows, dim=1)
    groups = _groups(directions, tolerance)
    rank = int(torch.linalg.matrix_rank(directions, rtol=tolerance))
    if rank != samples if samples is not None else rank == len(rows):
        return None
    rays = _extreme_rays(torch.stack([directions[group].mean(0) for group in groups]), rank, tolerance)
    if len(rays) != rank:
        return None
    amounts = torch.linalg.lstsq(rays.T, rows.T).solution  # (samples, used)
    if bool((amounts < -tolerance * amounts.abs().amax(1, keepdim=True)).any()):
        return None
    units = amounts.sum(1) / length if length is not None else _smallest(amounts)
    counts = amounts / units[:, None]
    whole = counts.round()
    if bool(((counts - whole).abs() > WHOLE).any()) or not torch.allclose(rays.T @ amounts, rows.T, atol=tolerance):
        return None
    counted: Tensor = whole.long()
    return counted


def _extreme_rays(directions: Tensor, most: int, tolerance: float) -> Tensor:
    """Those directions (n, width) that are no sum of positive multiples of the others."""
    coordinates = (directions @ torch.linalg.svd(directions, full_matrices=False).Vh[:most].T).numpy()
    kept = list(range(len(coordinates)))
    for number in range(len(coordinates)):
        others = [other for other in kept if other != number]
        if others and nnls(coordinates[others].T, coordinates[number])[1] <= tolerance:
            kept = others
    return directions[kept]


def _levelled(rows: Tensor) -> bool:
    """Whether the entries are all equally large: how often a row was used is then no longer in them."""
    sizes = rows.abs()[rows != 0]
    return rows.shape[1] > 1 and bool((sizes > (1 - WHOLE) * sizes.max()).double().mean() > LEVELLED)


def _groups(directions: Tensor, tolerance: float) -> list[list[int]]:
    """Rows that point the same way, the largest groups first."""
    left, groups = list(range(len(directions))), []
    while left:
        first = directions[left[0]]
        apart = (directions[left] - (directions[left] @ first)[:, None] * first).norm(dim=1)
        together = (apart < tolerance) & (directions[left] @ first > 0)
        groups.append([row for row, inside in zip(left, together.tolist(), strict=True) if inside])
        left = [row for row, inside in zip(left, together.tolist(), strict=True) if not inside]
    return sorted(groups, key=len, reverse=True)


def _smallest(amounts: Tensor) -> Tensor:
    smallest: Tensor = amounts.where(amounts > WHOLE * amounts.amax(1, keepdim=True), math.inf).amin(1)
    return smallest
