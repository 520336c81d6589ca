"""The row space of a gradient, how sure each of its directions is, and which vectors are in it.

The gradient of a matrix is a sum of (error) x (what the matrix was fed), so its rows are combinations of what was fed.
With fewer different inputs than rows and columns, the row space is the span of exactly these inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.separation.mixture import rounding_errors, sent_as

ROUNDING = 4.0
"""Rounding errors of an entry, in units of the number format's precision, that sums in a backward pass leave."""
FEW = 16
LEAST_SHARE = 0.1
"""Singular values that have to be as small as noise, at least so many and that part of all, to be taken for noise."""
UNEVEN = 3.0
"""How far rounding errors reach beyond white noise of their deviation: larger entries have larger ones."""
LEAST_ROOTS = 1.0
"""Difference of the roots of both sides from which the smallest singular value says how strong noise is."""
DEVIATIONS = 4.0
"""Standard deviations of its error up to which a vector counts as inside the span."""
LEAST_ERROR = 1e-4
"""Sine of the angle that is put down to the rounding of a forward pass in single precision."""
FALSE_ALARM = 0.5
"""Part of what a random vector has outside the span from which a vector is outside: no threshold may come near it."""


class RowSpace(NamedTuple):
    """Orthonormal `basis` (rank, width), and for each of its directions the sine `errors` (rank,) it may be off by."""

    basis: Tensor
    errors: Tensor
    rows: int
    """Most directions that the gradients could have: the smaller of their sides."""
    complete: bool
    """Whether there were fewer inputs than that, all else being rounding: then every input is in the span."""

    @property
    def rank(self) -> int:
        return len(self.basis)


def row_space(gradients: Sequence[Tensor], error: float = 0.0) -> RowSpace:
    """The directions of gradients (outputs, width) of what was fed alike that stand out from their errors.

    `error`: a deviation of the entries that is known beside rounding, as of a difference of two parameters.
    """
    width = gradients[0].shape[1]
    # In units of its own errors, no gradient's errors hide what a smaller one says.
    scaled = [each.double() / deviation for each in gradients if (deviation := max(error, rounding_of(each))) > 0]
    if not scaled:
        nothing = torch.zeros(0, width, dtype=torch.float64)
        return RowSpace(nothing, nothing[:, 0], 0, complete=False)
    rows = torch.cat(scaled)
    outputs = len(rows)
    rows = torch.linalg.qr(rows, mode="r").R if outputs > width else rows
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    noise = _noise(sizes, outputs, width)
    errors = noise * math.sqrt(width) / sizes
    kept = int((sizes > UNEVEN * noise * (math.sqrt(outputs) + math.sqrt(width))).sum())
    return RowSpace(directions[:kept], errors[:kept], len(sizes), complete=0 < kept < len(sizes))


def rounding_of(gradient: Tensor) -> float:
    """The deviation of its entries by rounding: of the sums that made it, or of the format it was sent in."""
    short = sent_as(gradient)
    if short is not None:
        return float(rounding_errors(gradient.double(), None, short).square().mean().sqrt())
    return ROUNDING * torch.finfo(gradient.dtype).eps * float(gradient.double().square().mean().sqrt())


def _noise(sizes: Tensor, outputs: int, width: int) -> float:
    """The deviation of white noise in every entry: 1, or more if the smallest singular values say so.

    The singular values of white noise are between the difference and the sum of the roots of both sides.
    """
    most, least = math.sqrt(outputs) + math.sqrt(width), math.sqrt(outputs) - math.sqrt(width)
    if float(sizes[-1]) <= most or least < LEAST_ROOTS:
        return 1.0
    noise = float(sizes[-1]) / least
    in_noise = int((sizes <= noise * most).sum())
    return noise if in_noise >= max(FEW, LEAST_SHARE * len(sizes)) else 1.0


class Membership(NamedTuple):
    """For each vector the sine of its angle to the span, and whether its error explains that."""

    outside: Tensor
    inside: Tensor


def in_span(vectors: Tensor, space: RowSpace) -> Membership:
    """Which vectors (n, width) are in a row space."""
    lengths = vectors.double().norm(dim=1, keepdim=True)
    unit = vectors.double() / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    along = unit @ space.basis.T
    outside = (unit - along @ space.basis).norm(dim=1)
    expected = DEVIATIONS * (along.square() @ space.errors.square()).sqrt() + LEAST_ERROR
    random = math.sqrt(max(0.0, 1 - space.rank / space.basis.shape[1]))
    something = lengths[:, 0] > LEAST_ERROR * lengths.max()
    return Membership(outside, something & (outside < expected.clamp(max=FALSE_ALARM * random)))
