"""How well an estimate of a batch explains the gradient: the recomputation behind the certificate, and sizes.

[G | g] = sum_i s_i v_i [x_i | 1], with v_i the signal that the network sends back for x_i, and s_i how much it counts.
All of it is computed in the few coordinates of a `Mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .dense import least_squares
from .ica import LOUDEST, Box, Unmixing, contrasts
from .mixture import Mixture
from .signals import FEW_CLASSES, Network, candidate_labels, sample_signals

CONFIRMED = 0.02
"""A column whose redundant units misfit less than this, relative to its mean entry, is taken for found."""
UNDECIDED, SILENT = 1e-3, 1e-3
"""Pre-activations this small, in standard deviations, may be of either sign; entries this small are zero."""
FINISHED = 1e-6
DISAGREE, RARELY, NUDGE, NUDGES = 1e-4, 0.1, 3e-6, 16
"""How far a signal must be from its column, of how large a share of the samples at most, for rounding to have decided
on which side of its threshold a unit further back is; by how much pre-activations are then moved, and how often."""
BIAS_SLACK = 3.0
"""How many standard deviations of the noise the bias gradient may be missed by."""
EQUALISATIONS, TRUSTED_BIAS = 8, 0.01
"""Steps towards inputs that count the same, taken where noise makes more than this of their sizes uncertain."""


@dataclass(frozen=True, kw_only=True)
class Behind:
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


class Problem(NamedTuple):
    mixture: Mixture
    behind: Behind
    complement: Tensor
    """(h, h - n): the directions that the columns do not span"""
    contrasts: Tensor
    """(n, groups, *grid) of the coordinates"""
    responses: Tensor
    """W Y^T (h, n): pre-activations of unmixed inputs without touching their d features again"""
    responses_change: Tensor | None
    gram: Tensor
    """[Y | b][Y | b]^T (n, n)"""
    energy: float
    """|G|^2 + |g|^2"""
    few_classes: bool
    finished: float
    """The residual below which nothing is left to gain."""
    box: Box | None
    """(low, high) of the inputs, where known"""


class State(NamedTuple):
    rows: Tensor
    """(n, n) unmixing rows"""
    columns: Tensor
    """(n, n): row i is the column of sample i"""
    residuals: Tensor

    @property
    def confirmed(self) -> Tensor:
        return self.found(CONFIRMED)

    def found(self, tolerance: float) -> Tensor:
        return self.residuals < tolerance


class Assessment(NamedTuple):
    state: State
    labels: Tensor
    shares: Tensor
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


def problem_of(
    mixture: Mixture,
    behind: Behind,
    weight_grad: Tensor,
    bias_grad: Tensor,
    image_shape: Sequence[int] | None,
    box: Box | None,
) -> Problem:
    both = torch.cat([mixture.coordinates, (mixture.basis.T @ bias_grad.double()).unsqueeze(1)], dim=1)
    energy = weight_grad.double().square().sum() + bias_grad.double().square().sum()
    complete = torch.linalg.qr(mixture.basis, mode="complete").Q
    change = behind.weight_change
    return Problem(
        mixture,
        behind,
        complete[:, mixture.size :],
        contrasts(mixture.coordinates, image_shape),
        behind.weight.double() @ mixture.coordinates.T,
        None if change is None else change.double() @ mixture.coordinates.T,
        both @ both.T,
        float(energy),
        behind.network(behind.bias.double().unsqueeze(0)).shape[1] <= FEW_CLASSES,
        FINISHED if weight_grad.dtype == torch.float32 else 0.0,
        box,
    )


def pre_activations(problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activations (samples, h) of unmixed inputs, and how far each stays from zero during local training."""
    activations = rows @ problem.responses.T + problem.behind.bias.double()
    if problem.responses_change is None or problem.behind.bias_change is None:
        return activations, activations.abs()
    change = rows @ problem.responses_change.T + problem.behind.bias_change.double()
    return activations, (activations.abs() - change.abs() / 2).clamp(min=0)


def unit_rows(rows: Tensor) -> Tensor:
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny)


def assess(problem: Problem, state: State) -> Assessment:
    """Recompute the gradient from the inputs; how much each of them counts is fitted.

    |[G | g] - sum_i s_i v_i [x_i | 1]|^2 needs only products of the signals v with L and of the coordinates with each
    other, so that the d features are not touched.
    """
    behind, rows = problem.behind, state.rows
    activations, _ = pre_activations(problem, rows)
    entries = signed_columns(state) @ problem.mixture.basis.T
    labels = candidate_labels(behind.network, behind.loss, activations, entries)
    activations = _settle(activations, entries)
    signals = sample_signals(behind.network, behind.loss, activations, labels)
    if bool(state.confirmed.all()):
        signals = _settle_behind(behind, activations, labels, signals, entries)
    gram = rows @ problem.gram @ rows.T
    target = ((signals @ problem.mixture.basis) * (rows @ problem.gram)).sum(1)
    normal = (signals @ signals.T) * gram
    shares = least_squares(normal, target.unsqueeze(1)).squeeze(1)
    once = shares.clamp(min=0.3 * shares.median()).min()  # what an input that occurs once counts
    times = (shares / once).nan_to_num().round().clamp(min=1)
    residuals = []
    for counts in (shares, torch.ones_like(shares), times):
        counted = counts * (counts @ target) / (counts @ normal @ counts)
        rest = problem.energy - 2 * counted @ target + counted @ normal @ counted
        residual = float((rest.clamp(min=0) / problem.energy).sqrt())
        residuals.append(math.inf if math.isnan(residual) else residual)
    weakest = float((counted * normal.diagonal().clamp(min=0).sqrt()).min()) / math.sqrt(problem.energy)
    fitted, even, whole = residuals
    return Assessment(state, labels, shares, times.long(), signals, fitted, even, whole, weakest)


def signed_columns(state: State) -> Tensor:
    """The columns, each pointing the way that its row, which has the sign of the input, counts as positive."""
    return torch.where((state.rows * state.columns).sum(1, keepdim=True) < 0, -state.columns, state.columns)


def _settle(activations: Tensor, entries: Tensor) -> Tensor:
    """Put units that are too close to their threshold to call on the side that their column's entry shows."""
    scale = activations.std(1, keepdim=True)
    silent = entries.abs() < SILENT * entries.abs().mean(1, keepdim=True)
    wrong = (activations.abs() < UNDECIDED * scale) & (silent == (activations > 0))
    barely = torch.finfo(activations.dtype).eps * scale
    return torch.where(wrong, torch.where(silent, -barely, barely), activations)


def _settle_behind(behind: Behind, activations: Tensor, labels: Tensor, signals: Tensor, entries: Tensor) -> Tensor:
    """Signals (n, h) with the units of later layers on the side of their threshold that the columns' entries show.

    Whoever computed the gradient rounded otherwise than is done here. A unit closer to its threshold than that may be
    on the other side, and the sample's signal is another. Nothing is known of the later layers, so pre-activations are
    moved at random, by about as much as rounding moves them and never across zero, until the signal is the column's.
    Where many samples disagree it is for another reason.
    """
    rng, signals = torch.Generator().manual_seed(0), signals.clone()
    columns = unit_rows(entries)
    apart = (unit_rows(signals) - columns).norm(dim=1)
    for _ in range(NUDGES):
        todo = (apart > DISAGREE).nonzero().flatten()
        if not 0 < len(todo) <= max(1, RARELY * len(signals)):
            break
        moves = torch.randn(len(todo), activations.shape[1], generator=rng, dtype=activations.dtype)
        moved = activations[todo] * (1 + NUDGE * moves.to(activations.device))
        others = sample_signals(behind.network, behind.loss, moved, labels[todo])
        distances = (unit_rows(others) - columns[todo]).norm(dim=1)
        better = distances < apart[todo]
        signals[todo[better]], apart[todo[better]] = others[better], distances[better]
    return signals


def equalise(problem: Problem, best: Assessment) -> Assessment:
    """Correct the inputs' sizes so that all count the same, where the gradient is explained better then.

    The bias gradient gives sizes exactly, but it is small, and noise upsets it before anything else: then this helps.
    An input that is too large by some factor is found to count less by that factor.
    """
    if bias_is_trusted(problem, best.state) or problem.responses_change is not None:
        return best
    for _ in range(EQUALISATIONS):
        # Half of the correction at a time: the signals change with the size as well.
        sizes = (best.shares / best.shares.median()).clamp(1 / LOUDEST, LOUDEST).sqrt()
        if not bool(sizes.isfinite().all()):
            break
        rows = _common_size(best.state.rows * sizes.unsqueeze(1), problem.mixture)
        resized = assess(problem, best.state._replace(rows=rows))
        if resized.even_residual >= best.even_residual or not _agrees_with_bias(problem.mixture, rows):
            break
        best = resized
    return best


def _agrees_with_bias(mixture: Mixture, rows: Tensor) -> bool:
    """Whether the columns add up to the bias gradient but for noise: inputs that were clipped do not count the same."""
    assert mixture.bias is not None
    missing = float((torch.linalg.pinv(rows).sum(1) - mixture.bias).norm())
    return missing < BIAS_SLACK * mixture.noise * math.sqrt(len(rows))


def _common_size(rows: Tensor, mixture: Mixture) -> Tensor:
    """Scale all rows alike so that the inputs explain the bias gradient, the sum of all columns, best."""
    total = torch.linalg.pinv(rows).sum(1)
    assert mixture.bias is not None
    factor = float(total @ mixture.bias / (total @ total))
    return rows / factor if factor > 0 else rows


def misfit_of(problem: Problem, assessment: Assessment) -> float:
    """What tells the better of two answers. Where sizes are uncertain they must not be fitted away."""
    trusted = bias_is_trusted(problem, assessment.state)
    return assessment.residual if trusted else assessment.even_residual


def bias_is_trusted(problem: Problem, state: State) -> bool:
    return problem.mixture.noise * float(state.rows.norm(dim=1).median()) < TRUSTED_BIAS


def likely_labels(separation: Unmixing, behind: Behind) -> Tensor | None:
    """The labels (n,) that explain best what each separated input adds to the gradient; None where scales are open."""
    if not separation.scaled:
        return None
    mixture, rows = separation.mixture, separation.rows
    responses = behind.weight.double() @ mixture.coordinates.T
    state = State(rows, torch.linalg.pinv(rows).T, rows.new_full((len(rows),), torch.inf))
    activations = rows @ responses.T + behind.bias.double()
    return candidate_labels(behind.network, behind.loss, activations, signed_columns(state) @ mixture.basis.T)
