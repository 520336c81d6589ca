"""Every user's update, from sums of updates and the participation matrix: linear least squares."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.sums import doubled_blocks

INDEPENDENT = 1e-10
"""Eigenvalue of the normal equations, relative to the largest, up to which it is rounding error."""
WELL_CONDITIONED = 1e3
"""Condition number of the matrix up to which noise is hardly amplified."""
DETERMINED = 1e-6
"""Fraction of a user's unit vector that rounding error may leave outside the rows of the matrix."""


class IdentifiabilityStatus(StrEnum):
    ALL = "every user's update can be told from the others'"
    ILL_CONDITIONED = "every user's update can be told from the others', but noise in the sums is amplified: see error"
    SOME = "some users always took part together, or never: only what they sent in sum is known, not each update"


class Identifiability(NamedTuple):
    users: Tensor
    """(users,): whose update the sums determine."""
    error: Tensor
    """(users,): standard deviation of an entry of the user's update, infinite where it is not determined.

    In units of the noise in the sums where `noise` is None, else absolute.
    """
    noise: float | None
    """Standard deviation of what the users' updates leave of the sums; None without sums or without rounds to spare."""
    condition: float
    """Condition number of the participation matrix on what it determines."""
    status: IdentifiabilityStatus


def disaggregate(aggregates: Any, matrix: Any) -> Tensor:
    """Each user's update (users, parameters), in the precision of `aggregates` (rounds, parameters).

    matrix (rounds, users) says who took part. Where the rounds are means, give what each user's update was multiplied
    with instead: participation over cohort size, or over examples. Users that cannot be told apart share their sum.
    Parameters are read in blocks, as a tensor, an array, a memory map or an iterable of blocks.
    """
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    solver = _solver(torch.as_tensor(matrix).to(device, torch.float64))
    blocks = _checked_blocks(aggregates, device, solver.inverse.shape[1])
    updates = [(solver.inverse @ block).to(dtype) for block, dtype in blocks]
    if not updates:
        raise ValueError(
            "sums must have the shape (rounds, parameters), but there are no parameters. Give at least one column."
        )
    return torch.cat(updates, 1)


def identifiable_users(matrix: Any, *, aggregates: Any = None) -> Identifiability:
    """Which users' updates the matrix (rounds, users) determines, and how exactly. See `disaggregate`."""
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    coefficients = torch.as_tensor(matrix).to(device, torch.float64)
    solver = _solver(coefficients)
    variance = solver.inverse.square().sum(1)
    rounds = len(coefficients)
    noise: float | None = None
    if aggregates is not None and rounds > solver.rank:
        missed, parameters = torch.zeros((), dtype=torch.float64, device=device), 0
        for block, _ in _checked_blocks(aggregates, device, rounds):
            missed += (block - coefficients @ (solver.inverse @ block)).square().sum()
            parameters += block.shape[1]
        noise = float((missed / max(1, parameters * (rounds - solver.rank))).sqrt())
    status = IdentifiabilityStatus.ALL
    if not bool(solver.determined.all()):
        status = IdentifiabilityStatus.SOME
    elif solver.condition > WELL_CONDITIONED:
        status = IdentifiabilityStatus.ILL_CONDITIONED
    error = torch.where(solver.determined, (1.0 if noise is None else noise) * variance.sqrt(), torch.inf)
    return Identifiability(solver.determined, error, noise, solver.condition, status)


def _checked_blocks(aggregates: Any, device: torch.device, rounds: int) -> Iterator[tuple[Tensor, torch.dtype]]:
    for block, dtype in doubled_blocks(aggregates, device):
        if len(block) != rounds:
            raise ValueError(
                f"sums and matrix must hold the same rounds, but the sums hold {len(block)} and the matrix {rounds}."
            )
        broken = ~torch.isfinite(block).all(1)
        if bool(broken.any()):
            raise ValueError(
                f"sums must be finite, but there is NaN or infinity in round {int(broken.nonzero()[0])}. Leave it out "
                "of both the sums and the matrix."
            )
        yield block, dtype


class _Solver(NamedTuple):
    inverse: Tensor
    """(users, rounds), the pseudo-inverse of the matrix."""
    determined: Tensor
    rank: int
    condition: float


def _solver(matrix: Tensor) -> _Solver:
    if matrix.dim() != 2 or not matrix.numel() or not bool(torch.isfinite(matrix).all()):
        raise ValueError(
            f"matrix (rounds, users) must be finite and not empty, but it has shape {tuple(matrix.shape)} "
            "or missing entries."
        )
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    kept = values > INDEPENDENT * values.max().clamp(min=1e-300)
    values, vectors = values[kept], vectors[:, kept]
    inverse = vectors / values @ vectors.T @ matrix.T
    # A user is determined where the rounds can express it alone: its unit vector lies in the row space.
    determined = vectors.square().sum(1) > 1 - DETERMINED
    condition = float((values.max() / values.min()).sqrt()) if len(values) else float("inf")
    return _Solver(inverse, determined, len(values), condition)
