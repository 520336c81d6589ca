"""L-BFGS on many independent problems at once: one tensor program, no problem ever sees another.

Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", 1989, without line search, step for step
what torch.optim.LBFGS does on each problem alone. The two loops of the method are two triangular systems in the inner
products s_i.y_j (Byrd, Nocedal, Schnabel, "Representations of quasi-Newton matrices", 1994): with R their upper
triangle, oldest pair first, and D its diagonal,

    R a = S g,    q = g - Y^T a,    R^T c = D a - gamma Y q,    direction = -(gamma q + S^T c)

so that a step is a handful of batched operations instead of two hundred dependent ones.

Differs from torch.optim.LBFGS in: a problem whose direction does not lead downhill forgets its curvature and goes on
along the gradient, where that one would stand still; a problem whose objective is no longer finite stops at its best
iterate; the triangular systems are solved in double precision.

Nothing here waits for the device: every decision is a mask, and no number comes from Python on the way. All state lives
in tensors that are written in place, so that a step can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Evaluate: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Points (trials, size) -> objectives (trials,) and gradients (trials, size); no row may depend on another."""

LEAST_CURVATURE = 1e-10
"""A pair of steps is remembered where s.y is above this, as in torch.optim.LBFGS."""


class BatchedLBFGS:
    """Where every trial stands, and its best point so far.

    point, gradient, best: (trials, size); value, best_value: (trials,). A trial stops for good once its objective is
    below `tolerance` (`reached`) or not finite (`strayed`).
    """

    def __init__(
        self, evaluate: Evaluate, start: Tensor, *, lr: float = 1.0, history: int = 100, tolerance: float = 0.0
    ) -> None:
        self._evaluate, self._lr, self._slots, self._tolerance = evaluate, lr, history, tolerance
        self.point = start.detach().clone()
        value, gradient = evaluate(self.point)
        self.value, self.gradient = value.detach().clone(), gradient.detach().clone()
        self.best = self.point.clone()
        self.best_value = torch.full_like(self.value, float("inf"))
        self.strayed = torch.zeros_like(self.value, dtype=torch.bool)
        self.reached = torch.zeros_like(self.strayed)
        (trials, size), zeros = start.shape, self.point.new_zeros
        self._steps, self._changes = zeros(trials, history, size), zeros(trials, history, size)
        self._products = zeros(trials, history, history, dtype=torch.float64)
        """s_i.y_j in the order of the slots"""
        self._used = torch.zeros(trials, history, dtype=torch.bool, device=start.device)
        self._slot = torch.zeros(trials, dtype=torch.long, device=start.device)
        """Where the next pair goes; the oldest lies there, once all slots are used."""
        self._scale = torch.ones_like(self.value)
        self._trials = torch.arange(trials, device=start.device)
        self._offsets = torch.arange(history, device=start.device)
        self._last = torch.zeros_like(self.point)
        self._book()

    @property
    def active(self) -> Tensor:
        return ~(self.strayed | self.reached)

    def step(self) -> None:
        """One step of every active trial."""
        moving = self.active.unsqueeze(1)
        self.point.copy_(torch.where(moving, self._next(), self.point))
        value, gradient = (tensor.detach() for tensor in self._evaluate(self.point))
        self._remember(gradient)
        self.value.copy_(value)
        self.gradient.copy_(gradient)
        self._book()

    def _book(self) -> None:
        better = self.value < self.best_value  # False for NaN
        self.best_value.copy_(torch.where(better, self.value, self.best_value))
        self.best.copy_(torch.where(better.unsqueeze(1), self.point, self.best))
        # A zero times a NaN is a NaN: a sum of squares would overflow where the entries are still finite.
        finite = self.value.isfinite() & self.gradient.isfinite().all(1)
        self.strayed.logical_or_(~finite)
        self.reached.logical_or_(self.best_value < self._tolerance)
        # Back to where the objective is finite: numbers that are not slow some machines down.
        self.point.copy_(torch.where(finite.unsqueeze(1), self.point, self.best))

    def _next(self) -> Tensor:
        direction = self._direction()
        downhill = (self.gradient * direction).sum(1) < 0  # False for NaN
        self._used.logical_and_(downhill.unsqueeze(1))
        fresh = ~self._used.any(1)
        shortened = self.gradient.abs().sum(1).clamp(min=1.0).masked_fill(~fresh, 1.0)
        length = self._lr / shortened.unsqueeze(1)
        self._last.copy_(length * torch.where(fresh.unsqueeze(1), -self.gradient, direction))
        return self.point + self._last

    def _direction(self) -> Tensor:
        order = (self._slot.unsqueeze(1) + self._offsets) % self._slots  # oldest first
        used = self._used.gather(1, order)
        rows = order.unsqueeze(2).expand(-1, -1, self._slots)
        products = self._products.gather(1, rows).gather(2, rows.transpose(1, 2))
        products = products.masked_fill(~(used.unsqueeze(2) & used.unsqueeze(1)), 0.0)
        diagonal = products.diagonal(dim1=1, dim2=2)
        triangle = torch.triu(products) + torch.diag_embed((~used).to(products))
        along = self._along(self._steps, self.gradient).gather(1, order).double() * used
        first = torch.linalg.solve_triangular(triangle, along.unsqueeze(2), upper=True).squeeze(2)
        rest = self.gradient - self._sum(self._changes, first, order)
        scale = self._scale.unsqueeze(1)
        back = (scale * self._along(self._changes, rest)).gather(1, order).double() * used
        right = (diagonal * first - back).unsqueeze(2)
        second = torch.linalg.solve_triangular(triangle.transpose(1, 2), right, upper=False).squeeze(2)
        return -(scale * rest + self._sum(self._steps, second, order))

    def _along(self, pairs: Tensor, vector: Tensor) -> Tensor:
        """The inner product of every slot with the trial's vector: (trials, slots)."""
        return torch.bmm(pairs, vector.unsqueeze(2)).squeeze(2)

    def _sum(self, pairs: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        """The slots weighted and added up; weights come oldest first."""
        placed = torch.zeros_like(weights).scatter(1, order, weights).to(pairs)
        return torch.bmm(placed.unsqueeze(1), pairs).squeeze(1)

    def _remember(self, gradient: Tensor) -> None:
        """The last step and the change of the gradient along it, if its curvature is positive."""
        change = gradient - self.gradient
        curvature = (change * self._last).sum(1)
        kept = (curvature > LEAST_CURVATURE) & curvature.isfinite() & self.active
        column = kept.unsqueeze(1)
        places = (self._trials, self._slot)
        self._steps[places] = torch.where(column, self._last, self._steps[places])
        self._changes[places] = torch.where(column, change, self._changes[places])
        self._used[places] = self._used[places] | kept
        products = self._along(self._steps, change.masked_fill(~column, 0.0)).double()
        newest = (self._trials, slice(None), self._slot)
        self._products[newest] = torch.where(column, products, self._products[newest])
        self._scale.copy_(torch.where(kept, curvature / change.square().sum(1), self._scale))
        self._slot.copy_(torch.where(kept, (self._slot + 1) % self._slots, self._slot))
