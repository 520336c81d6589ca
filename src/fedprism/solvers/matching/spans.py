"""The span of what a layer was fed, out of the gradient of its weight.

The gradient of a matrix that is applied at several places is the sum over places of (what is sent back) times (what was
fed). With fewer places than rows and columns, its row space is the span of what was fed.

Where the singular values end and noise begins is read off the gradient: the smallest ones must look like those of a
matrix of random numbers (Marchenko, Pastur 1967), or be at the rounding error of the number format.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

EDGE_MARGIN = 1.5
"""How far above the largest singular value of noise alone one is counted: its largest entries are not all alike."""
ROUNDING = 1.0
"""Singular values up to this many machine precisions of the largest, times the root of the longer side: rounding."""
LEAST_NOISE_VALUES = 3
"""Singular values of noise that say how large it is; fewer may be small by chance."""
GAPS = 4
"""Largest ratios between neighbouring singular values at which the noise may begin."""
LIKE_NOISE = 1.5
"""Largest factor between sorted singular values and those of random numbers of the same shape: 1.2 for noise itself."""


class SpanStatus(StrEnum):
    SPAN = "the rows of the gradient span what the layer was fed"
    CUT = "noise hides the weakest part of what the layer was fed: the span holds the rest"
    CROWDED = "the gradient has as many independent rows as it can have: it spans less than what the layer was fed"
    NOISE = "no part of the gradient is larger than its noise: it says nothing about what the layer was fed"
    EMPTY = "the gradient is zero: it says nothing about what the layer was fed"


class Span(NamedTuple):
    basis: Tensor
    """(rank, features), orthonormal rows."""
    rank: int
    noise: float
    """The standard deviation of the noise in an entry, by the singular values that were cut."""
    status: SpanStatus
    cut: float
    """Singular values up to this one count as noise."""
    values: Tensor
    """All singular values, largest first."""

    @property
    def informative(self) -> bool:
        """Whether the span says something about what the layer was fed."""
        return self.status in (SpanStatus.SPAN, SpanStatus.CUT)


def gradient_span(weight_grad: Tensor, *, most: int | None = None) -> Span:
    """The span of what was fed to a layer whose weight has this gradient (outputs, features).

    `most`: the number of places of all samples together, if it is known: no span is larger.
    """
    gradient = weight_grad.detach().flatten(1)
    rounding = float(torch.finfo(gradient.dtype).eps)
    gradient = gradient.double()
    alive = gradient[gradient.any(1)]
    height, width = len(alive), int(alive.any(0).sum())
    if not height:
        return Span(gradient[:0], 0, 0.0, SpanStatus.EMPTY, 0.0, gradient.new_zeros(0))
    _, values, rows = torch.linalg.svd(alive, full_matrices=False)
    possible = min(height, width)
    values, rows = values[:possible], rows[:possible]
    floor = ROUNDING * rounding * math.sqrt(max(height, width)) * float(values[0])
    if most is None:
        rank = _rank(values, height, width, floor)
    else:
        rank = min(int((values > floor).sum()), most, possible)
        rank = _without_noise(rank, values, height, width)
    noise = _noise(values[rank:], height - rank, width - rank) if rank < possible else 0.0
    cut = float(values[rank]) if rank < possible else 0.0
    if not rank:
        status = SpanStatus.NOISE
    elif rank >= possible:
        status = SpanStatus.CROWDED
    else:
        status = SpanStatus.SPAN if cut <= floor else SpanStatus.CUT
    return Span(rows[:rank], rank, noise, status, cut, values)


def _noise(values: Tensor, height: int, width: int) -> float:
    """The standard deviation of the entries of a random matrix with these singular values."""
    return float(values.square().sum().sqrt()) / math.sqrt(height * width)


def _edge(noise: float, height: int, width: int) -> float:
    """The largest singular value that noise alone has."""
    return EDGE_MARGIN * noise * (math.sqrt(height) + math.sqrt(width))


def _without_noise(rank: int, values: Tensor, height: int, width: int) -> int:
    """The rank if what is behind this one is noise: less by all that is no larger than such noise can be."""
    while 0 < rank <= len(values) - LEAST_NOISE_VALUES:
        noise = _noise(values[rank:], height - rank, width - rank)
        above = int((values[:rank] > _edge(noise, height - rank, width - rank)).sum())
        if above == rank:
            break
        rank = above
    return rank


def _rank(values: Tensor, height: int, width: int, floor: float) -> int:
    """The least rank whose remaining singular values are rounding, or look like those of random numbers."""
    above = int((values > floor).sum())
    possible = len(values)
    candidates = [above]
    drops = (values[:-1] / values[1:].clamp_min(torch.finfo(values.dtype).tiny)).argsort(descending=True)[:GAPS] + 1
    for rank in sorted({0, *drops.tolist()}):
        allowed = rank < above and possible - rank >= LEAST_NOISE_VALUES
        if allowed and _looks_random(values[rank:], height - rank, width - rank):
            candidates.append(rank)
    return min(candidates)


def _looks_random(values: Tensor, height: int, width: int) -> bool:
    rng = torch.Generator().manual_seed(0)
    drawn = torch.linalg.svdvals(torch.randn(height, width, generator=rng, dtype=torch.float64)).to(values)
    ratio = (values / drawn)[: max(LEAST_NOISE_VALUES, 3 * len(values) // 4)]  # the smallest ones scatter most
    return float(ratio.max()) <= LIKE_NOISE * float(ratio.min())


class Summand(NamedTuple):
    factor: float
    """How often the part is in the whole."""
    error: float
    """How far the part is from being a summand, relative to it: rounding if it is one, about 1 of anything else."""


def summand(whole: Tensor, part: Tensor, rank: int) -> Summand:
    """Whether a matrix is a sum of a multiple of `part` and of something with as much less rank.

    `rank`: that of the whole. Then part · whole⁺ · part is a multiple of the part (Wedderburn 1934), whatever the rest.
    """
    whole, part = whole.double(), part.double()
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    size = float(part.norm())
    if not rank or not size > 0:
        return Summand(0.0, 1.0)
    inside_columns, inside_rows = left.T @ part, part @ right.T
    product = (inside_rows / values) @ inside_columns
    multiple = float((product * part).sum()) / size**2
    if multiple == 0 or not math.isfinite(multiple):
        return Summand(0.0, 1.0)
    beyond = (part - left @ inside_columns).norm(), (part - inside_rows @ right).norm()
    error = max(float((product / multiple - part).norm()), *map(float, beyond)) / size
    return Summand(1 / multiple, error)
