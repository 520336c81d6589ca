"""Nonlinear least squares by Levenberg and Marquardt, for thousands of unknowns on a CPU or a GPU.

Levenberg 1944, Marquardt 1963; the damping follows Nielsen 1999, bounds are kept by projection as in Kanzow, Yamashita,
Fukushima 2004. The Jacobian is written out by forward mode, some columns at a time, or never written out: then each
step is found by conjugate gradients on products with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from fedprism.runtime import memory

FIRST_DAMPING = 1e-3
"""Of a typical squared column of the Jacobian: Nielsen 1999 starts between 1e-6 and 1."""
MOST_DAMPING = 1e12
"""Damping from which a step changes nothing any more."""
LEAST_DAMPING = 1e-14
"""Below the rounding of a squared column in double precision."""
NO_GAIN = 1e-6
"""Part of the cost that a step must promise: less is the slow end of a search, or rounding."""
LEAST_GAIN = 1e-4
"""Part of the predicted gain that a step must bring to be taken."""
SAFEST_CUT = 1 / 3
"""The least factor that the damping is multiplied by after a good step: Nielsen 1999."""
COLUMNS = 64
"""Columns of the Jacobian that are computed together, unless said."""
CONJUGATE_STEPS = 200
"""Products with the Jacobian per step, at most, if it is not written out."""
FORCING = 0.1
"""Part of the gradient that conjugate gradients may leave in a step: less pays only near the solution."""


class LeastSquaresStatus(StrEnum):
    CONVERGED = "the cost is below the tolerance"
    STATIONARY = "no small step lowers the cost any more: this is a minimum, to rounding"
    STEPS = "stopped at the step limit; the best point is returned"
    NOT_FINITE = "the residual at the start is not finite; the start is returned"


class LeastSquares(NamedTuple):
    solution: Tensor
    cost: float
    """Half of the sum of squares."""
    status: LeastSquaresStatus
    steps: int
    """How many steps were taken or tried."""
    damping: float
    history: tuple[float, ...]
    """The cost after each step."""
    normal: Tensor | None
    """The Jacobian's product with itself, (unknowns, unknowns), at the solution or the last point before it; None if it
    was not written out."""


def levenberg_marquardt(
    residual: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    bounds: tuple[Tensor | float, Tensor | float] | None = None,
    steps: int = 100,
    tolerance: float = 0.0,
    matrix_free: bool = False,
    columns: int = COLUMNS,
    listen: Callable[[int, float], object] | None = None,
) -> LeastSquares:
    """Find x, in the shape of `start`, with the least sum of squares of residual(x), a vector.

    `bounds` (low, high): numbers, or tensors that fit x. `tolerance`: a cost to stop at. `matrix_free`: do not write
    the Jacobian out. `columns`: how many of its columns are computed together. `listen(step, cost)` is told of every
    step.
    """
    shape = start.shape
    box = None
    if bounds is not None:
        box = tuple(torch.as_tensor(b).to(start).expand(shape).flatten() for b in bounds)

    def flat(x: Tensor) -> Tensor:
        return residual(x.view(shape)).flatten()

    x = start.detach().flatten().clone()
    x = x if box is None else x.clamp(*box)
    value = flat(x).detach()
    cost = _cost(value)
    history = [cost]
    if not math.isfinite(cost):
        unchanged = start.detach().clone()
        return LeastSquares(unchanged, cost, LeastSquaresStatus.NOT_FINITE, 0, FIRST_DAMPING, (cost,), None)
    damping, growth, status, step = FIRST_DAMPING, 2.0, LeastSquaresStatus.STEPS, 0
    normal: Tensor | None = None
    local: _Explicit | _MatrixFree | None = None
    hopeless = False
    while step < steps:
        if cost <= tolerance:
            break
        if local is None:
            local = (_MatrixFree if matrix_free else _Explicit)(flat, x, value, columns)
            normal = local.normal
        step += 1
        move = local.step(damping, _free(x, local.slope, box))
        if move is None:
            damping, growth = damping * growth, growth * 2
        else:
            reached = x + move if box is None else (x + move).clamp(*box)
            clipped = box is not None and not torch.equal(reached, x + move)
            move = reached - x
            next_value = flat(reached).detach()
            next_cost = _cost(next_value)
            predicted = local.predicted(move)
            hopeless = damping <= FIRST_DAMPING and not clipped and predicted <= NO_GAIN * cost
            if predicted > 0 and next_cost < cost and cost - next_cost > LEAST_GAIN * predicted:
                gain = (cost - next_cost) / predicted
                damping = max(damping * max(SAFEST_CUT, 1 - (2 * gain - 1) ** 3), LEAST_DAMPING)
                growth, x, value, cost, local = 2.0, reached, next_value, next_cost, None
            else:
                damping, growth = damping * growth, growth * 2
        history.append(cost)
        if damping > MOST_DAMPING or hopeless:
            status = LeastSquaresStatus.STATIONARY
            break
        if listen is not None:
            listen(step, cost)
    if cost <= tolerance:
        status = LeastSquaresStatus.CONVERGED
    return LeastSquares(x.view(shape), cost, status, step, damping, tuple(history), normal)


def _cost(value: Tensor) -> float:
    return 0.5 * float(value.double().square().sum())


def _free(x: Tensor, slope: Tensor, box: tuple[Tensor, ...] | None) -> Tensor | None:
    """Which unknowns may move: those that are not at a bound which the slope pushes them against."""
    if box is None:
        return None
    low, high = box
    return ~(((x <= low) & (slope > 0)) | ((x >= high) & (slope < 0)))


class _Explicit:
    """The linear model of a residual around a point, by its Jacobian's products with itself."""

    def __init__(self, flat: Callable[[Tensor], Tensor], x: Tensor, value: Tensor, columns: int) -> None:
        size, columns = len(x), memory.together(columns)
        jacobian = torch.empty(size, len(value), dtype=value.dtype, device=value.device)  # a row per unknown
        for first in range(0, size, columns):
            some = min(columns, size - first)
            directions = torch.zeros(some, size, dtype=x.dtype, device=x.device)
            directions[torch.arange(some), first + torch.arange(some)] = 1
            with warnings.catch_warnings():  # torch compiles what forward mode needs in a way that it calls outdated
                warnings.simplefilter("ignore", FutureWarning)
                jacobian[first : first + some] = vmap(lambda d: jvp(flat, (x,), (d,))[1])(directions).detach()
        self.normal = (jacobian @ jacobian.T).double()
        self.slope = (jacobian @ value).double()
        self.scale = self.normal.diagonal().mean()
        self.like = x

    def step(self, damping: float, free: Tensor | None) -> Tensor | None:
        matrix = self.normal.clone()
        matrix.diagonal().add_(damping * self.scale)
        slope = self.slope
        if free is not None and not bool(free.all()):
            kept = free.to(matrix)
            matrix = matrix * kept * kept[:, None] + torch.diag((1 - kept) * self.scale)
            slope = slope * kept
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed):
            return None
        move = -torch.cholesky_solve(slope[:, None], factor)[:, 0]
        return move.to(self.like) if bool(torch.isfinite(move).all()) else None

    def predicted(self, move: Tensor) -> float:
        """How much the linear model says that the cost falls."""
        move = move.double()
        return -float(self.slope @ move + 0.5 * move @ (self.normal @ move))


class _MatrixFree:
    """The linear model of a residual around a point, by products with its Jacobian alone."""

    def __init__(self, flat: Callable[[Tensor], Tensor], x: Tensor, value: Tensor, columns: int) -> None:
        self.flat, self.x, self.normal = flat, x, None
        self.backward = vjp(flat, x)[1]
        self.slope = self.backward(value)[0]
        probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        self.scale = float(self._squared(probe) @ probe) / len(x)  # mean diagonal of the normal matrix, by one sample

    def _squared(self, direction: Tensor) -> Tensor:
        product: Tensor = self.backward(jvp(self.flat, (self.x,), (direction,))[1])[0]
        return product

    def step(self, damping: float, free: Tensor | None) -> Tensor | None:
        kept = torch.ones_like(self.x) if free is None else free.to(self.x)
        move, left = torch.zeros_like(self.x), -self.slope * kept
        direction, size = left.clone(), float(left @ left)
        enough = FORCING**2 * size
        for _ in range(CONJUGATE_STEPS):
            if size <= enough or size == 0:
                break
            product = (self._squared(direction) + damping * self.scale * direction) * kept
            curvature = float(direction @ product)
            if not (curvature > 0 and math.isfinite(curvature)):
                break
            along = size / curvature
            move, left = move + along * direction, left - along * product
            before, size = size, float(left @ left)
            direction = left + (size / before) * direction
        return move if bool(move.any()) and bool(torch.isfinite(move).all()) else None

    def predicted(self, move: Tensor) -> float:
        """How much the linear model says that the cost falls."""
        moved = jvp(self.flat, (self.x,), (move,))[1]
        return -float(self.slope @ move) - 0.5 * float(moved @ moved)
