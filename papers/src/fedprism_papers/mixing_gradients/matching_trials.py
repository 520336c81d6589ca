"""Gradient matching of many independent trials at once: many small problems in one tensor program.

A trial is what `match_gradients` solves alone: one batch, one start. Small networks leave a machine idle between the
launches of their kernels; sixty trials side by side cost little more than one. No trial depends on another: each has
its own curvature, its own best iterate and its own failure.

Differs from `match_gradients` in: L-BFGS takes single quasi-Newton steps, `inner` of them an iteration, and forgets
what it knows of the curvature when a direction does not lead downhill, not when an iteration gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedprism.runtime.cuda_graphs import Repeated
from fedprism.solvers.matching.distances import Gradients
from fedprism.solvers.matching.gradients import LBFGS, MatchingSettings
from fedprism_papers.mixing_gradients.lbfgs import BatchedLBFGS

CHECK_EVERY = 100
"""Steps between two looks at whether any trial still moves: a look makes a GPU wait."""


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
    """How many steps were run; trials that had stopped stood still in some of them."""
    stepping: str = ""
    """How the steps were run, and why not as a CUDA graph if they were not."""


def match_trials(
    gradients_of: Callable[[Tensor, Tensor | None], Gradients],
    target: Gradients,
    start: Tensor,
    search: MatchingSettings,
    *,
    label_start: Tensor | None = None,
) -> Trials:
    """`match_gradients` for every trial; `search`, whose optimizer is L-BFGS, is about a single one.

    start (trials, batch, *input_shape), label_start (trials, batch, classes); target: (trials, *shape) a parameter, and
    so is what gradients_of(inputs, label_logits) returns, differentiably.
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

    optimizer = search.optimizer
    assert isinstance(optimizer, LBFGS)
    with search.engine.settings():
        descent = BatchedLBFGS(evaluate, flat, lr=search.lr, history=optimizer.history, tolerance=search.tolerance)
        step = Repeated(descent.step, start.device, graph=search.engine.graph)
        steps = _advance(descent, step, search, optimizer.inner)
    inputs, logits = unpacked(descent.best)
    inputs = inputs if search.box is None else inputs.clamp(*search.box)
    return Trials(inputs, logits, descent.best_value, _statuses(descent), steps, str(step))


def _advance(descent: BatchedLBFGS, step: Repeated, search: MatchingSettings, inner: int) -> int:
    """Take all steps, or fewer if no trial moves any more, and return their number."""
    for number in range(search.iterations * inner):
        if number % CHECK_EVERY == 0 and not bool(descent.active.any()):
            return number
        step()
        if (number + 1) % inner == 0:
            search.report((number + 1) // inner)
    return search.iterations * inner


def _statuses(descent: BatchedLBFGS) -> tuple[TrialStatus, ...]:
    """The first that holds for each trial."""
    by_rank = (TrialStatus.DIVERGED, TrialStatus.REACHED, TrialStatus.STRAYED, TrialStatus.ITERATIONS)
    diverged, otherwise = ~descent.best_value.isfinite(), torch.ones_like(descent.reached)
    holds = torch.stack([diverged, descent.reached, descent.strayed, otherwise])
    return tuple(by_rank[rank] for rank in holds.int().argmax(0).tolist())
