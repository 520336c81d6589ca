"""Gradient matching of many independent trials at once: many small problems in one tensor program.

A trial is what `match_gradients` solves alone: one batch, one start. Small networks leave a machine idle between the
launches of their kernels; sixty trials side by side cost little more than one. No trial depends on another: each has
its own curvature, its own best iterate and its own failure.

Differs from `match_gradients` in: L-BFGS takes single quasi-Newton steps, `inner` of them an iteration, and forgets
what it knows of the curvature when a direction does not lead downhill, not when an iteration gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedprism.runtime.cuda_graphs import Repeated
from fedprism.solvers.matching.distances import Gradients
from fedprism.solvers.matching.gradients import LBFGS, MatchingSettings
from fedprism_papers.mixing_gradients.lbfgs import BatchedLBFGS, Descent, Evaluate

CHECK_EVERY = 100
"""Steps between two looks at whether any trial still moves: a look makes a GPU wait."""
DECAYS, FLOOR = (0.9, 0.999), 1e-8
"""Adam's published constants."""


class TrialStatus(StrEnum):
    REACHED = "the objective fell below the tolerance"
    ITERATIONS = "stopped at the iteration limit; the best iterate is returned"
    STRAYED = "the objective stopped being finite; the best iterate before that is returned"
    DIVERGED = "the objective was never finite; the start is returned"


class Trials(NamedTuple):
    inputs: Tensor
    """(trials, batch, *input_shape)"""
    label_logits: Tensor | None
    """(trials, batch, classes)"""
    objectives: Tensor
    """(trials,), infinite where it was never finite"""
    statuses: tuple[TrialStatus, ...]
    steps: int
    """How many steps were taken; trials that had stopped stood still in some of them."""
    stepping: str = ""
    """How the steps were run; where no CUDA graph was, why."""


def match_trials(
    gradients_of: Callable[[Tensor, Tensor | None], Gradients],
    target: Gradients,
    start: Tensor,
    search: MatchingSettings = MatchingSettings(),  # noqa: B008 (frozen)
    *,
    label_start: Tensor | None = None,
) -> Trials:
    """`match_gradients` for every trial: all tensors have a leading dimension of trials.

    start (trials, batch, *input_shape), label_start (trials, batch, classes); target: (trials, *shape) a parameter, and
    so is what gradients_of(inputs, label_logits) returns, differentiably. What `search` says of distance, priors and
    box is about a single trial.
    """
    pixels = math.prod(start.shape[1:])
    flat = start.flatten(1) if label_start is None else torch.cat([start.flatten(1), label_start.flatten(1)], dim=1)
    distances, beliefs = vmap(search.distance), [vmap(prior) for prior in search.priors]

    def unpacked(points: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs = points[:, :pixels].view_as(start)
        return inputs, None if label_start is None else points[:, pixels:].view_as(label_start)

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        inputs, logits = unpacked(points)
        values = distances(list(gradients_of(inputs, logits)), list(target))
        for belief in beliefs:
            values = values + belief(inputs)
        # The gradient of the sum: no trial's objective depends on another's point.
        (gradient,) = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradient

    optimizer, box, iterations = search.optimizer, search.box, search.iterations
    with search.engine.settings():
        if isinstance(optimizer, LBFGS):
            descent: Descent = BatchedLBFGS(
                evaluate, flat, lr=search.lr, history=optimizer.history, tolerance=search.tolerance
            )
        else:
            descent = BatchedAdam(
                evaluate,
                flat,
                rates=[search.lr * optimizer.rate(done / iterations) for done in range(iterations)],
                pixels=pixels,
                signed=optimizer.signed,
                box=None if box is None else (_spread(box[0], start), _spread(box[1], start)),
                tolerance=search.tolerance,
            )
        step = Repeated(descent.step, start.device, graph=search.engine.graph)
        taken = _advance(descent, step, search)
    inputs, logits = unpacked(descent.best)
    inputs = inputs if box is None else inputs.clamp(*box)
    return Trials(inputs, logits, descent.best_value, _statuses(descent), taken, str(step))


def _spread(end: Tensor, start: Tensor) -> Tensor:
    """One end of the box for every entry of a trial's inputs."""
    return end.expand(start.shape[1:]).flatten()


def _advance(descent: Descent, step: Repeated, search: MatchingSettings) -> int:
    """Take all steps, or fewer where no trial is left that moves. Says how many were taken."""
    inner = search.optimizer.inner if isinstance(search.optimizer, LBFGS) else 1
    for number in range(search.iterations * inner):
        if number % CHECK_EVERY == 0 and not bool(descent.active.any()):
            return number
        step()
        if (number + 1) % inner == 0:
            search.report((number + 1) // inner)
    return search.iterations * inner


def _statuses(descent: Descent) -> tuple[TrialStatus, ...]:
    told = zip(descent.best_value.isfinite().tolist(), descent.reached.tolist(), descent.strayed.tolist(), strict=True)
    return tuple(
        TrialStatus.DIVERGED
        if not finite
        else TrialStatus.REACHED
        if reached
        else TrialStatus.STRAYED
        if strayed
        else TrialStatus.ITERATIONS
        for finite, reached, strayed in told
    )


class BatchedAdam(Descent):
    """Adam on every trial, one of `rates` a step; the first `pixels` entries, the inputs, are kept in `box`.

    With `signed` the inputs follow the sign of their gradient.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        start: Tensor,
        *,
        rates: Sequence[float],
        pixels: int,
        signed: bool = False,
        box: tuple[Tensor, Tensor] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        super().__init__(evaluate, start, tolerance=tolerance)
        self._signed, self._pixels, self._box = signed, pixels, box
        self._mean, self._square = torch.zeros_like(self.point), torch.zeros_like(self.point)
        self._count = torch.zeros(1, dtype=torch.long, device=start.device)
        slow, slower = DECAYS
        # For every step beforehand, because a captured step looks its own up: the rate over the mean's correction for
        # its start at zero, and the root of the square's.
        table = [(rate / (1 - slow**done), math.sqrt(1 - slower**done)) for done, rate in enumerate(rates, start=1)]
        self._table = torch.tensor(table, dtype=start.dtype, device=start.device)

    def _next(self) -> Tensor:
        gradient, (slow, slower) = self.gradient, DECAYS
        if self._signed:
            gradient = torch.cat([gradient[:, : self._pixels].sign(), gradient[:, self._pixels :]], dim=1)
        rate, root = self._table.index_select(0, self._count).unbind(1)
        self._count.add_(1)
        self._mean.lerp_(gradient, 1 - slow)
        self._square.mul_(slower).addcmul_(gradient, gradient, value=1 - slower)
        point = self.point - rate * self._mean / (self._square.sqrt() / root + FLOOR)
        if self._box is None:
            return point
        inputs = torch.minimum(torch.maximum(point[:, : self._pixels], self._box[0]), self._box[1])
        return torch.cat([inputs, point[:, self._pixels :]], dim=1)
