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

from fedprism.runtime.cuda_graphs import Engine, Repeated
from fedprism.solvers.matching.differences import ROUGH_STEP, STEP, Differenced, TwoLosses
from fedprism.solvers.matching.distances import Distance, Gradients, cosine, slope_towards
from fedprism.solvers.matching.objective import Objective, Parts, Prior

Progress: TypeAlias = Callable[[int, int], None]
MEAN_DECAY = 0.9
"""Adam's decay per iteration of the mean of slopes: Kingma, Ba 2015."""
SQUARE_DECAY = 0.999
"""Adam's decay per iteration of the mean of squared slopes: Kingma, Ba 2015."""
ROOT_FLOOR = 1e-8
"""What Adam adds to the root of the mean square so that it is not zero: Kingma, Ba 2015."""
CHECK_EVERY = 100
"""Iterations between two comparisons with the tolerance: reading the objective makes a GPU wait."""


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
    stepping: str = ""
    """How the iterations were run; where no CUDA graph was, why."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam; `signed` steps along the sign of the gradient.

    The rate falls linearly to zero; with `stepwise`, as published, it is divided by ten at 3/8, 5/8 and 7/8 of the way.
    """

    signed: bool = True
    stepwise: bool = False

    def rate(self, done: float) -> float:
        """The fraction of the learning rate after the fraction `done` of the iterations."""
        return 0.1 ** sum(done >= eighths / 8 for eighths in (3, 5, 7)) if self.stepwise else 1 - done


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS; an iteration is up to `inner` quasi-Newton steps. `line_search` uses the strong Wolfe conditions."""

    inner: int = 20
    history: int = 100
    line_search: bool = False


@dataclass(frozen=True, kw_only=True)
class MatchingSettings:
    """What gradient matching minimises, `distance` plus `priors` of the inputs, and how.

    tolerance: an objective at which to stop before all `iterations`. box (low, high), broadcastable to the inputs: Adam
    is projected onto it after every step, L-BFGS only at the end, because that would spoil its memory of curvature.
    progress(done, iterations) is called after each iteration.
    """

    distance: Distance = cosine
    priors: Sequence[Prior] = ()
    optimizer: Adam | LBFGS = Adam()
    lr: float = 0.1
    iterations: int = 1000
    tolerance: float = 0.0
    box: tuple[Tensor, Tensor] | None = None
    progress: Progress | None = None
    engine: Engine = Engine()  # noqa: RUF009 (frozen)

    def report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.iterations)


def match_gradients(
    gradients_of: Callable[[Tensor, Tensor | None], Gradients],
    target: Gradients,
    start: Tensor,
    settings: MatchingSettings = MatchingSettings(),
    *,
    label_start: Tensor | None = None,
    parts: Parts | None = None,
    losses: TwoLosses | None = None,
) -> Matching:
    """Find inputs, from `start`, with gradients_of(inputs, label_logits) close to `target` as the settings say.

    gradients_of must be differentiable; label_start (batch, classes) are logits optimised along with the inputs, None
    keeps the labels fixed. `parts`: where gradients_of is a mean over samples, how to ask for some of them at a time;
    it costs a further pass. `losses`: whose gradient gradients_of is, to take differences instead of differentiating.
    """
    inputs = start.detach().clone().requires_grad_()
    logits = None if label_start is None else label_start.detach().clone().requires_grad_()
    slope = slope_towards(settings.distance, target, spending=losses is not None and losses.sent_of is None)
    priors = tuple(settings.priors)
    length = ROUGH_STEP if settings.engine.tf32 and start.is_cuda else STEP  # TF32 is a GPU's
    objective: Objective | Differenced = (
        Objective(inputs, logits, gradients_of, slope, priors, parts)
        if losses is None
        else Differenced(inputs, logits, losses, slope, priors, length)
    )
    best = _Best(objective.variables)
    with settings.engine.settings():
        if isinstance(settings.optimizer, LBFGS):
            history, converged = _minimise_lbfgs(objective, best, settings.optimizer, settings)
            stepping = "step by step, because L-BFGS decides on the way"
        else:
            descent = _AdamDescent(objective, best, settings.optimizer, settings)
            step = Repeated(descent.step, start.device, graph=settings.engine.graph)
            history, converged = _minimise_adam(descent, step, settings)
            stepping = str(step)
    value = float(best.value)
    status = MatchingStatus.CONVERGED if converged else MatchingStatus.ITERATIONS
    status = status if value < float("inf") else MatchingStatus.DIVERGED
    inputs, *label_logits = best.copies
    inputs = inputs if settings.box is None else inputs.clamp(*settings.box)
    return Matching(inputs, label_logits[0] if label_logits else None, value, history, status, stepping)


class _Best:
    """The variables at the smallest finite objective so far, kept on the device without waiting for it."""

    def __init__(self, variables: list[Tensor]) -> None:
        self.variables = variables
        self.copies = [variable.detach().clone() for variable in variables]
        self.value = torch.full((), float("inf"), dtype=variables[0].dtype, device=variables[0].device)

    def consider(self, value: Tensor) -> None:
        better = value < self.value  # False for NaN
        for copy, now in zip([self.value, *self.copies], [value, *self.variables], strict=True):
            torch.where(better, now.detach(), copy, out=copy)


class _AdamDescent:
    """Adam as a step that only changes tensors in place, so that a GPU can repeat it by itself."""

    def __init__(self, objective: Objective | Differenced, best: _Best, adam: Adam, settings: MatchingSettings) -> None:
        self.objective, self.best, self.box = objective, best, settings.box
        self.variables = variables = objective.variables
        self.signed = adam.signed
        self.means = [torch.zeros_like(variable) for variable in variables]
        self.squares = [torch.zeros_like(variable) for variable in variables]
        like = variables[0].detach()
        self.history = like.new_empty(settings.iterations)
        self.done = torch.zeros(1, dtype=torch.int64, device=like.device)
        # For every iteration the rate over the mean's correction for its start at zero, and the root of the square's.
        self.rates = like.new_tensor(
            [
                (
                    settings.lr * adam.rate(done / settings.iterations) / (1 - MEAN_DECAY ** (done + 1)),
                    math.sqrt(1 - SQUARE_DECAY ** (done + 1)),
                )
                for done in range(settings.iterations)
            ]
        )

    def step(self) -> None:
        value, slopes = self.objective()
        with torch.no_grad():
            self.history.index_copy_(0, self.done, value.reshape(1))
            self.best.consider(value)
            rate, root = self.rates.index_select(0, self.done).unbind(1)
            slopes[0] = slopes[0].sign() if self.signed else slopes[0]
            for variable, slope, mean, square in zip(self.variables, slopes, self.means, self.squares, strict=True):
                mean.lerp_(slope, 1 - MEAN_DECAY)
                square.mul_(SQUARE_DECAY).addcmul_(slope, slope, value=1 - SQUARE_DECAY)
                variable.sub_(mean / square.sqrt().div_(root).add_(ROOT_FLOOR) * rate)
            if self.box is not None:
                self.variables[0].clamp_(*self.box)
            self.done.add_(1)


def _minimise_adam(descent: _AdamDescent, step: Repeated, settings: MatchingSettings) -> tuple[Tensor, bool]:
    for iteration in range(settings.iterations):
        step()
        settings.report(iteration + 1)
        is_checked = settings.tolerance > 0 and iteration % CHECK_EVERY == 0
        if is_checked and float(descent.history[iteration]) < settings.tolerance:
            return descent.history[: iteration + 1].cpu(), True
    descent.best.consider(descent.objective.value())
    return descent.history.cpu(), False


def _minimise_lbfgs(
    objective: Objective | Differenced, best: _Best, lbfgs: LBFGS, settings: MatchingSettings
) -> tuple[Tensor, bool]:
    variables = objective.variables

    def fresh() -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            variables,
            lr=settings.lr,
            max_iter=lbfgs.inner,
            history_size=lbfgs.history,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe" if lbfgs.line_search else None,
        )

    def closure() -> Tensor:
        value, slopes = objective()
        for variable, slope in zip(variables, slopes, strict=True):
            variable.grad = slope
        best.consider(value)
        return value

    optimizer, stalls, history = fresh(), 0, list[float]()
    for iteration in range(settings.iterations):
        previous = float(best.value)
        history.append(float(optimizer.step(closure)))  # type: ignore[no-untyped-call]
        settings.report(iteration + 1)
        reached = float(best.value)
        if not math.isfinite(history[-1]):
            break
        # A step that gains nothing may only mean that the curvature remembered is no longer true: forget it once.
        stalls = stalls + 1 if reached == previous else 0
        if stalls:
            optimizer = fresh()
        if reached < settings.tolerance or stalls > 1:
            return torch.tensor(history), True
    return torch.tensor(history), False
