"""How well an estimate of a batch explains the gradient: the recomputation behind the certificate, and sizes.

[G | g] = sum_i s_i v_i [x_i | 1], with v_i the signal that the network sends back for x_i, and s_i how much it counts.
All of it is computed in the few coordinates of a `Mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.closed_form.dense import least_squares
from fedprism.solvers.separation.ica import LOUDEST, Box, Unmixing, contrasts
from fedprism.solvers.separation.mixture import Mixture
from fedprism.solvers.separation.signals import FEW_CLASSES, Network, candidate_labels, row_lengths, sample_signals

CONFIRMED = 0.02
"""Misfit of a column's redundant units, relative to its mean entry, below which the column is confirmed."""
UNDECIDED = 1e-3
"""Pre-activations this small, in standard deviations, may be of either sign."""
SILENT_ENTRY = 1e-3
"""Entries of a column below this fraction of the mean one are zero."""
FINISHED = 1e-6
"""Residual, relative to the gradient, below which rounding to single precision leaves nothing to gain."""
LEAST_COUNT = 0.3
"""Fraction of the median weight below which no input is taken for one that occurs once."""
SIGNAL_GAP = 1e-4
"""Distance of a signal from its column, both of unit length, above which a later unit is on the wrong side."""
MOST_ON_WRONG_SIDE = 0.1
"""Fraction of the samples above which it is not rounding that sets signals apart from their columns."""
NUDGE = 3e-6
"""Relative size of random moves of pre-activations: about as much as rounding in single precision moves them."""
NUDGES = 16
"""How many random moves are tried at most."""
BIAS_SLACK = 3.0
"""How many standard deviations of the noise the bias gradient may be missed by."""
EQUALISATIONS = 8
"""Most steps towards inputs that count the same."""
TRUSTED_BIAS = 0.01
"""Noise in an input, in the input's units, above which the bias gradient does not tell its size."""


@dataclass(frozen=True, kw_only=True)
class Downstream:
    """The network as the layer sees it. With local steps between two known models: their middle, and the difference.

    network: outputs (samples, classes) of pre-activations (samples, h), sample by sample. weight (h, d) and bias (h,)
    of the layer; weight_change and bias_change: what local training added to them.
    """

    network: Network
    loss: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    bias: Tensor
    weight_change: Tensor | None = None
    bias_change: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A gradient in few coordinates, the network that sent it, and what follows from both."""

    mixture: Mixture
    downstream: Downstream
    gradient: tuple[Tensor, Tensor]
    """G (h, d) and g (h,)"""
    image_shape: Sequence[int] | None
    box: Box | None
    """(low, high) of the inputs, where known"""

    @property
    def several_steps(self) -> bool:
        return self.downstream.weight_change is not None

    @cached_property
    def bias(self) -> Tensor:
        """L^T g (n,)"""
        return self.mixture.basis.T @ self.gradient[1].double()

    @cached_property
    def complement(self) -> Tensor:
        """(h, h - n): the directions that the columns do not span"""
        outside: Tensor = torch.linalg.qr(self.mixture.basis, mode="complete").Q[:, self.mixture.size :]
        return outside

    @cached_property
    def contrasts(self) -> Tensor:
        """(n, groups, *grid) of the coordinates"""
        return contrasts(self.mixture.coordinates, self.image_shape)

    @cached_property
    def responses(self) -> Tensor:
        """W Y^T (h, n): pre-activations of unmixed inputs without touching their d features again"""
        return self.downstream.weight.double() @ self.mixture.coordinates.T

    @cached_property
    def response_change(self) -> Tensor:
        assert self.downstream.weight_change is not None
        return self.downstream.weight_change.double() @ self.mixture.coordinates.T

    @cached_property
    def gram(self) -> Tensor:
        """[Y | b][Y | b]^T (n, n)"""
        both = torch.cat([self.mixture.coordinates, self.bias.unsqueeze(1)], dim=1)
        return both @ both.T

    @cached_property
    def energy(self) -> float:
        """|G|^2 + |g|^2"""
        weight_grad, bias_grad = self.gradient
        return float(weight_grad.double().square().sum() + bias_grad.double().square().sum())

    @cached_property
    def few_classes(self) -> bool:
        return self.downstream.network(self.downstream.bias.double().unsqueeze(0)).shape[1] <= FEW_CLASSES

    @property
    def finished(self) -> float:
        """The residual below which nothing is left to gain."""
        return FINISHED if self.gradient[0].dtype == torch.float32 else 0.0


class State(NamedTuple):
    rows: Tensor
    """(n, n) unmixing rows"""
    columns: Tensor
    """(n, n): row i is the column of sample i"""
    residuals: Tensor
    """(n,) the columns' misfits; inf where nothing fits"""

    @classmethod
    def unconfirmed(cls, rows: Tensor, columns: Tensor) -> State:
        return cls(rows, columns, rows.new_full((len(rows),), torch.inf))

    @property
    def confirmed(self) -> Tensor:
        return self.fitting(CONFIRMED)

    def fitting(self, tolerance: float) -> Tensor:
        return self.residuals < tolerance

    @property
    def signed_columns(self) -> Tensor:
        """The columns, each pointing the way that its row, which has the sign of the input, counts as positive."""
        opposed = (self.rows * self.columns).sum(1, keepdim=True) < 0
        return torch.where(opposed, -self.columns, self.columns)


class Assessment(NamedTuple):
    state: State
    labels: Tensor
    weights: Tensor
    """(n,) how much each input counts, by least squares"""
    times: Tensor
    """The same in whole numbers"""
    signals: Tensor
    """(n, h) what the network sends back for each input"""
    residual: float
    even_residual: float
    """The residual if all inputs counted the same."""
    whole_residual: float
    """The residual if they counted a whole number of times."""
    weakest: float
    """What the quietest input then adds to the gradient, in the unit of the residuals"""


def pre_activations(problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activations (samples, h) of unmixed inputs, and how far each stays from zero during local training."""
    activations = rows @ problem.responses.T + problem.downstream.bias.double()
    if not problem.several_steps or problem.downstream.bias_change is None:
        return activations, activations.abs()
    change = rows @ problem.response_change.T + problem.downstream.bias_change.double()
    return activations, (activations.abs() - change.abs() / 2).clamp(min=0)


def unit_rows(rows: Tensor) -> Tensor:
    return rows / row_lengths(rows).unsqueeze(1)


def assess(problem: Problem, state: State) -> Assessment:
    """Recompute the gradient from the inputs, and fit how much each of them counts, without touching the d features."""
    downstream, rows = problem.downstream, state.rows
    activations, _ = pre_activations(problem, rows)
    entries = state.signed_columns @ problem.mixture.basis.T
    labels = candidate_labels(downstream.network, downstream.loss, activations, entries)
    activations = _settle(activations, entries)
    signals = sample_signals(downstream.network, downstream.loss, activations, labels)
    if bool(state.confirmed.all()):
        signals = _settle_later_layers(downstream, activations, labels, signals, entries)
    gram = rows @ problem.gram @ rows.T
    target = ((signals @ problem.mixture.basis) * (rows @ problem.gram)).sum(1)
    normal = (signals @ signals.T) * gram
    weights = least_squares(normal, target.unsqueeze(1)).squeeze(1)
    once = weights.clamp(min=LEAST_COUNT * weights.median()).min()
    times = (weights / once).nan_to_num().round().clamp(min=1)
    residuals = []
    for counts in (weights, torch.ones_like(weights), times):
        counted = counts * (counts @ target) / (counts @ normal @ counts)
        rest = problem.energy - 2 * counted @ target + counted @ normal @ counted
        residual = float((rest.clamp(min=0) / problem.energy).sqrt())
        residuals.append(math.inf if math.isnan(residual) else residual)
    weakest = float((counted * normal.diagonal().clamp(min=0).sqrt()).min()) / math.sqrt(problem.energy)
    fitted, even, whole = residuals
    return Assessment(state, labels, weights, times.long(), signals, fitted, even, whole, weakest)


def _settle(activations: Tensor, entries: Tensor) -> Tensor:
    """Put units that are too close to their threshold to call on the side that their column's entry shows."""
    scale = activations.std(1, keepdim=True)
    silent = entries.abs() < SILENT_ENTRY * entries.abs().mean(1, keepdim=True)
    wrong = (activations.abs() < UNDECIDED * scale) & (silent == (activations > 0))
    barely = torch.finfo(activations.dtype).eps * scale
    return torch.where(wrong, torch.where(silent, -barely, barely), activations)


def _settle_later_layers(
    downstream: Downstream, activations: Tensor, labels: Tensor, signals: Tensor, entries: Tensor
) -> Tensor:
    """Signals (n, h) with later layers' units, which the client rounded otherwise, on the side that the columns show.

    Pre-activations are moved at random, never across zero, until the signal is the column's.
    """
    rng, signals = torch.Generator().manual_seed(0), signals.clone()
    columns = unit_rows(entries)
    gaps = (unit_rows(signals) - columns).norm(dim=1)
    for _ in range(NUDGES):
        todo = (gaps > SIGNAL_GAP).nonzero().flatten()
        if not 0 < len(todo) <= max(1, MOST_ON_WRONG_SIDE * len(signals)):
            break
        moves = torch.randn(len(todo), activations.shape[1], generator=rng, dtype=activations.dtype)
        moved = activations[todo] * (1 + NUDGE * moves.to(activations.device))
        others = sample_signals(downstream.network, downstream.loss, moved, labels[todo])
        distances = (unit_rows(others) - columns[todo]).norm(dim=1)
        better = distances < gaps[todo]
        signals[todo[better]], gaps[todo[better]] = others[better], distances[better]
    return signals


def equalise(problem: Problem, best: Assessment) -> Assessment:
    """Correct the inputs' sizes, which noise upsets first, so that all count the same, where that explains more."""
    if bias_is_trusted(problem, best.state) or problem.several_steps:
        return best
    for _ in range(EQUALISATIONS):
        # Half of the correction at a time: the signals change with the size as well.
        sizes = (best.weights / best.weights.median()).clamp(1 / LOUDEST, LOUDEST).sqrt()
        if not bool(sizes.isfinite().all()):
            break
        rows = best.state.rows * sizes.unsqueeze(1)
        total = torch.linalg.pinv(rows).sum(1)  # of all columns, which the bias gradient is
        factor = float(total @ problem.bias / (total @ total))
        rows = rows / factor if factor > 0 else rows
        resized = assess(problem, best.state._replace(rows=rows))
        # Inputs that were clipped do not count the same: then the columns do not add up to the bias gradient.
        missing = float((torch.linalg.pinv(rows).sum(1) - problem.bias).norm())
        agrees = missing < BIAS_SLACK * problem.mixture.noise * math.sqrt(len(rows))
        if resized.even_residual >= best.even_residual or not agrees:
            break
        best = resized
    return best


def misfit_of(problem: Problem, assessment: Assessment) -> float:
    """What tells the better of two answers: where sizes are uncertain they must not be fitted away."""
    trusted = bias_is_trusted(problem, assessment.state)
    return assessment.residual if trusted else assessment.even_residual


def bias_is_trusted(problem: Problem, state: State) -> bool:
    return problem.mixture.noise * float(state.rows.norm(dim=1).median()) < TRUSTED_BIAS


def likely_labels(separation: Unmixing, downstream: Downstream) -> Tensor | None:
    """The labels (n,) that explain best what each separated input adds to the gradient; None where scales are open."""
    if not separation.scaled:
        return None
    mixture, rows = separation.mixture, separation.rows
    responses = downstream.weight.double() @ mixture.coordinates.T
    activations = rows @ responses.T + downstream.bias.double()
    entries = State.unconfirmed(rows, torch.linalg.pinv(rows).T).signed_columns @ mixture.basis.T
    return candidate_labels(downstream.network, downstream.loss, activations, entries)
