"""Which vectors of a dictionary a gradient of few rows is made of: rank-aware matching pursuit.

Davies & Eldar, "Rank awareness in joint sparse recovery", 2012.

With fewer rows than different inputs, no input is in the row space. The best vector of the dictionary is taken and
projected out until the rest of the row space has room for all that are left; these are then told exactly.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.tokens.span import DEVIATIONS, LEAST_ERROR, RowSpace, in_span

CLEAR = 0.3
"""Sine by which what is left of a direction may be off and still say something."""
NEARLY = 0.999
"""Part of a vector's square inside the span, in single precision, from which it is looked at in double precision."""
LEAST_OPEN = 0.1
"""Sine of the angle to the vectors taken from which a vector can still be told from them."""
MARGIN = 0.9
"""Part of the width that taken vectors and rows may fill: in a full space every vector is inside."""
MOST_INSIDE = 0.5
"""Part of a dictionary from which on a span holds vectors because it is full, not because they were fed."""
NEEDED = 10.0
"""Times its error that a vector's share in the rows must be."""


class PursuitStatus(StrEnum):
    SPANNED = "each of the vectors is in the row space, and no other is"
    PURSUED = "the vectors explain every row to rounding error; some were chosen one by one"
    CROWDED = "there are more vectors in the rows than the width can tell apart"
    UNEXPLAINED = "no vectors of the dictionary explain the rows"
    SILENT = "no row stands out from its rounding errors"


class Pursuit(NamedTuple):
    chosen: Tensor
    """(n,) numbers of the vectors, in the order in which they were taken."""
    greedy: int
    """How many of them were chosen one by one: a wrong choice among these is possible."""
    left: float
    """The largest sine between a row and what the vectors explain."""
    status: PursuitStatus


def pursue(space: RowSpace, vectors: Tensor) -> Pursuit:
    """The vectors (n, width) that the rows are combinations of. The number of vectors need not be known."""
    none = torch.empty(0, dtype=torch.long)
    if not space.rank:
        return Pursuit(none, 0, 1.0, PursuitStatus.SILENT)
    if space.complete:
        chosen = in_span(vectors, space).inside.nonzero().flatten()
        if len(chosen) > MOST_INSIDE * len(vectors):
            return Pursuit(none, 0, 1.0, PursuitStatus.CROWDED)
        return _finished(space, vectors, chosen, 0, PursuitStatus.SPANNED)
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    width = space.basis.shape[1]
    taken = torch.zeros(0, width, dtype=torch.float64)
    open_squares = torch.ones(len(unit))
    numbers, picked = list[int](), list[int]()
    while len(taken) < MARGIN * width:
        rest, errors = _rest(space, taken)
        if not len(rest):
            order = torch.tensor(picked + [number for number in numbers if number not in picked])
            return _finished(space, vectors, order, len(picked), PursuitStatus.PURSUED)
        squares = (unit @ rest.float().T).square().sum(1)
        shares = torch.where(open_squares > LEAST_OPEN**2, squares / open_squares.clamp_min(1e-12), 0.0)
        added = _inside(vectors, shares, taken, rest, errors).tolist()
        if not added:
            added = [int(shares.argmax())]
            picked += added
        before = len(taken)
        for number in added:
            taken = _with(taken, vectors[number])
        numbers += added
        open_squares = open_squares - (unit @ taken[before:].float().T).square().sum(1)
    return Pursuit(none, 0, 1.0, PursuitStatus.CROWDED)


def _with(taken: Tensor, vector: Tensor) -> Tensor:
    """One more orthonormal direction, unless the vector is in the span already."""
    direction = torch.nn.functional.normalize(vector.double(), dim=0)
    for _ in range(2):  # a second time, because the first leaves rounding errors
        direction = direction - taken.T @ (taken @ direction)
    length = direction.norm()
    return torch.cat([taken, direction[None] / length]) if length > LEAST_ERROR else taken


def _rest(space: RowSpace, taken: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of the rows: orthonormal directions outside the taken vectors, and their errors."""
    outside = space.basis - space.basis @ taken.T @ taken
    mixed, sizes, rest = torch.linalg.svd(outside, full_matrices=False)
    # A direction that is left with a small part of itself has all of its error in that part.
    errors = (mixed.T.square() @ space.errors.square()).sqrt() / sizes.clamp_min(LEAST_ERROR)
    kept = (sizes > LEAST_ERROR) & (errors < CLEAR)
    return rest[kept], errors[kept]


def _inside(vectors: Tensor, shares: Tensor, taken: Tensor, rest: Tensor, errors: Tensor) -> Tensor:
    """The vectors that are in the span of what was taken and what is left, in double precision."""
    near = (shares > NEARLY).nonzero().flatten()
    if not len(near):
        return near
    together = RowSpace(
        torch.cat([taken, rest]), torch.cat([torch.zeros(len(taken)).double(), errors]), 0, complete=False
    )
    return near[in_span(vectors[near], together).inside]


def needed_for(space: RowSpace, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the vectors (n, width) of length one the rows need, and how much of each row they miss together."""
    shares = torch.linalg.lstsq(unit.T, space.basis.T, driver="gelsd").solution  # (n, rank)
    missed = (space.basis - shares.T @ unit).norm(dim=1)
    # Without a vector, what it adds to each row goes missing, up to what the other vectors make up for.
    apart = 1 / torch.linalg.pinv(unit @ unit.T).diagonal().clamp_min(1e-12).sqrt()
    return (apart[:, None] * shares.abs() > NEEDED * (space.errors + LEAST_ERROR)).any(1), missed


def _finished(space: RowSpace, vectors: Tensor, chosen: Tensor, greedy: int, status: PursuitStatus) -> Pursuit:
    """The chosen vectors that the rows need, and whether these explain the rows."""
    for _ in range(2):
        unit = torch.nn.functional.normalize(vectors[chosen].double(), dim=1)
        if not len(unit) or len(unit) > MARGIN * unit.shape[1]:
            return Pursuit(chosen[:0], 0, 1.0, PursuitStatus.CROWDED)
        needed, missed = needed_for(space, unit)
        if bool(needed.all()):
            break
        greedy -= int((~needed[:greedy]).sum())
        chosen = chosen[needed]
    explained = bool((missed <= DEVIATIONS * space.errors + math.sqrt(len(chosen)) * LEAST_ERROR).all())
    if not explained:
        return Pursuit(chosen[:0], 0, float(missed.max()), PursuitStatus.UNEXPLAINED)
    return Pursuit(chosen, greedy, float(missed.max()), status)
