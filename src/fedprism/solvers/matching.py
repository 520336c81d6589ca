"""Gradient matching: find inputs whose gradient, or simulated update, is the observed one.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (squared distance, L-BFGS);
Geiping, Bauermeister, Dröge, Moeller, "Inverting Gradients", NeurIPS 2020 (cosine distance, signed Adam, box).

Differs from the papers' code in: the iterate returned is the one with the smallest objective, not the last one; Adam's
rate falls linearly unless asked for the published steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = Sequence[Tensor]
Distance: TypeAlias = Callable[[Gradients, Gradients], Tensor]
Prior: TypeAlias = Callable[[Tensor], Tensor]
Progress: TypeAlias = Callable[[int, int], None]


class MatchingStatus(StrEnum):
    CONVERGED = "the objective fell below the tolerance or stopped changing"
    ITERATIONS = "stopped at the iteration limit; the best iterate is returned"
    DIVERGED = "the objective was never finite; the start is returned"


class Matching(NamedTuple):
    inputs: Tensor
    label_logits: Tensor | None
    objective: float
    history: Tensor
    """The objective before every iteration."""
    status: MatchingStatus


def squared_error(gradients: Gradients, target: Gradients) -> Tensor:
    """Sum of squared differences over all entries."""
    return torch.stack([(g - t).square().sum() for g, t in zip(gradients, target, strict=True)]).sum()


def cosine(gradients: Gradients, target: Gradients) -> Tensor:
    """One minus the cosine of the angle between the two, all tensors taken as one long vector."""
    product = torch.stack([(g * t).sum() for g, t in zip(gradients, target, strict=True)]).sum()
    norm = torch.stack([g.square().sum() for g in gradients]).sum()
    target_norm = torch.stack([t.square().sum() for t in target]).sum()
    # The floor keeps the derivative finite where every entry is zero (a batch that no unit reacts to).
    tiny = torch.finfo(norm.dtype).tiny
    return 1 - product / ((norm + tiny).sqrt() * (target_norm + tiny).sqrt())


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam; `signed` steps along the sign of the gradient.

    The rate falls linearly to zero; with `stepwise`, as published, it is divided by ten at 3/8, 5/8 and 7/8 of the way.
    """

    signed: bool = True
    stepwise: bool = False

    def rate(self, done: float) -> float:
        """The share of the learning rate that is left when `done` (0 to 1) of the iterations are over."""
        return 0.1 ** sum(done >= eighths / 8 for eighths in (3, 5, 7)) if self.stepwise else 1 - done


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS; an iteration is up to `inner` quasi-Newton steps. `line_search` uses the strong Wolfe conditions."""

    inner: int = 20
    history: int = 100
    line_search: bool = False


def match_gradients(
    gradients_of: Callable[[Tensor, Tensor | None], Gradients],
    target: Gradients,
    start: Tensor,
    *,
    label_start: Tensor | None = None,
    distance: Distance = cosine,
    priors: Sequence[Prior] = (),
    optimizer: Adam | LBFGS | None = None,
    lr: float = 0.1,
    iterations: int = 1000,
    tolerance: float = 0.0,
    box: tuple[Tensor, Tensor] | None = None,
    progress: Progress | None = None,
) -> Matching:
    """Minimise distance(gradients_of(inputs, label_logits), target) + priors(inputs) from `start`.

    gradients_of must be differentiable; label_start (batch, classes) are logits optimised along with the inputs, None
    keeps the labels fixed. `box` (low, high), broadcastable to the inputs: Adam is projected onto it after every step,
    L-BFGS, whose memory of curvature that would spoil, only at the end.
    """
    inputs = start.detach().clone().requires_grad_()
    logits = None if label_start is None else label_start.detach().clone().requires_grad_()
    variables = [inputs] if logits is None else [inputs, logits]

    def objective() -> Tensor:
        value = distance(gradients_of(inputs, logits), target)
        for prior in priors:
            value = value + prior(inputs)
        grads = torch.autograd.grad(value, variables)
        for variable, gradient in zip(variables, grads, strict=True):
            variable.grad = gradient
        return value.detach()

    best = _Best(variables)
    budget = _Budget(lr, iterations, tolerance, box, progress or (lambda done, total: None))
    if isinstance(optimizer, LBFGS):
        history, converged = _minimise_lbfgs(objective, variables, best, optimizer, budget)
    else:
        history, converged = _minimise_adam(objective, variables, best, optimizer or Adam(), budget)
    value = float(best.value)
    status = MatchingStatus.CONVERGED if converged else MatchingStatus.ITERATIONS
    status = status if value < float("inf") else MatchingStatus.DIVERGED
    found_inputs = best.copies[0]
    if box is not None:
        found_inputs = found_inputs.clamp(*box)
    return Matching(found_inputs, best.copies[1] if logits is not None else None, value, history, status)


class _Budget(NamedTuple):
    lr: float
    iterations: int
    tolerance: float
    box: tuple[Tensor, Tensor] | None
    progress: Progress


class _Best:
    """The variables at the smallest finite objective so far, kept on the device without waiting for it."""

    def __init__(self, variables: list[Tensor]) -> None:
        self.variables = variables
        self.copies = [variable.detach().clone() for variable in variables]
        self.value = torch.full((), float("inf"), dtype=variables[0].dtype, device=variables[0].device)

    def consider(self, value: Tensor) -> None:
        better = value < self.value  # False for NaN
        self.value = torch.where(better, value, self.value)
        self.copies = [torch.where(better, v.detach(), c) for v, c in zip(self.variables, self.copies, strict=True)]


def _minimise_adam(
    objective: Callable[[], Tensor], variables: list[Tensor], best: _Best, settings: Adam, budget: _Budget
) -> tuple[Tensor, bool]:
    optimizer = torch.optim.Adam(variables, lr=budget.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.rate(step / budget.iterations))
    history = torch.empty(budget.iterations, dtype=variables[0].dtype, device=variables[0].device)
    check_every = 100  # reading the objective makes a GPU wait
    for iteration in range(budget.iterations):
        value = objective()
        history[iteration] = value
        best.consider(value)
        if budget.tolerance > 0 and iteration % check_every == 0 and float(value) < budget.tolerance:
            return history[: iteration + 1].cpu(), True
        if settings.signed:
            variables[0].grad = variables[0].grad.sign() if variables[0].grad is not None else None
        optimizer.step()
        schedule.step()
        if budget.box is not None:
            with torch.no_grad():
                variables[0].clamp_(*budget.box)
        budget.progress(iteration + 1, budget.iterations)
    best.consider(objective())
    return history.cpu(), False


def _minimise_lbfgs(
    objective: Callable[[], Tensor], variables: list[Tensor], best: _Best, settings: LBFGS, budget: _Budget
) -> tuple[Tensor, bool]:
    def fresh() -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            variables,
            lr=budget.lr,
            max_iter=settings.inner,
            history_size=settings.history,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe" if settings.line_search else None,
        )

    def closure() -> Tensor:
        value = objective()
        best.consider(value)
        return value

    optimizer, stalls, history = fresh(), 0, list[float]()
    for iteration in range(budget.iterations):
        previous = float(best.value)
        history.append(float(optimizer.step(closure)))  # type: ignore[no-untyped-call]
        budget.progress(iteration + 1, budget.iterations)
        reached = float(best.value)
        if not math.isfinite(history[-1]):
            break
        # A step that gains nothing may only mean that the curvature remembered is no longer true: forget it once.
        stalls = stalls + 1 if reached == previous else 0
        if stalls:
            optimizer = fresh()
        if reached < budget.tolerance or stalls > 1:
            return torch.tensor(history), True
    return torch.tensor(history), False
