"""The exact stage: from approximate inputs of a dense layer to the inputs themselves, with proof.

[G | g] = A [X | 1]. Separation (`ica.unmix`) finds X only statistically. But the columns of A are not arbitrary: behind
a ReLU, entry j of sample i's column is exactly zero where unit j is silent for x_i, and elsewhere it is the signal that
the network behind sends back. An approximate x_i tells nearly all of that, and a column in a known n-dimensional space
is over-determined by it (`columns`). From the columns follow the inputs, by one small inverse.

The certificate: the gradient recomputed from the recovered inputs and labels, compared with the observed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .columns import SPARE_UNITS, Columns, signal_columns, silent_columns
from .dense import least_squares
from .ica import (
    LOUDEST,
    StudentICA,
    Unmixing,
    contrasts,
    scale_rows,
    separate_by_likelihood,
    unmix_mixture,
    usable_mixture,
)
from .matching import Progress
from .mixture import Mixture
from .published import CocktailObjective
from .signals import FEW_CLASSES, Network, candidate_labels, correction_directions, is_rectified, sample_signals

CONFIRMED = 0.02
"""A column whose redundant units misfit less than this, relative to its mean entry, is taken for found."""
CERTAIN, NEARLY_ALL = 3e-4, 0.95
"""The same, where nothing but the silent units can confirm it; and how many must be, for them to be of use."""
MOST_OVERLAP = 0.1
"""Noise relative to the weakest sample above which nothing counts as confirmed."""
SAME = 0.99
"""Columns with a larger cosine are one."""
QUICK_ITERATIONS, QUICK_PLACES = 25, 1000
"""Effort of the coarse separation that is tried first."""
UNDECIDED, SILENT = 1e-3, 1e-3
"""Pre-activations this small, in standard deviations, may be of either sign; entries this small are zero."""
FINISHED = 1e-6
EXPLAINED = {False: 1e-4, True: 1e-6}
"""Residuals below this are rounding error, for gradients in single and in double precision."""
BIAS_SLACK = 3.0
"""How many standard deviations of the noise the bias gradient may be missed by."""
EQUALISATIONS, TRUSTED_BIAS = 8, 0.01
"""Steps towards inputs that count the same, taken where noise makes more than this of their sizes uncertain."""
DRIFTING = 0.05
"""Weight of a unit that is not silent in an update of several local steps."""
NOISY = 0.3
"""What a column may misfit in a noisy gradient."""
LOOSENING, LOOSEST = 4.0, 2.0
"""By how much the tolerance for a fit grows where nothing else is found, and where it ends: with any fit at all."""


class ExactStatus(StrEnum):
    EXACT = "the gradient recomputed from the inputs is the observed one to rounding error"
    CONFIRMED = "every input is confirmed by the units it leaves silent; several local steps allow no recomputation"
    PARTIAL = "some inputs' signals are confirmed, the others are not, and what is wrong in those blends into all"
    NO_REDUNDANCY = "the layer has too few units beyond the batch size to confirm anything; separated statistically"
    UNCONFIRMED = "no input could be confirmed (noise, a defense, or samples much alike); separated statistically"
    NO_BIAS = "without the gradient of the layer's bias scale and sign are unknown; separated statistically"
    NOT_RECTIFIED = "no ReLU follows the layer, so that no unit is silent; separated statistically"
    EMPTY = "the gradient is zero or not finite: nothing to separate"


class ExactBatch(NamedTuple):
    inputs: Tensor
    """(n, d), in the precision of the gradient"""
    labels: Tensor | None
    """(n,)"""
    exact: bool
    confirmed: Tensor
    """(n,) bool: which inputs' columns were confirmed by redundant units"""
    residual: float
    """Relative distance between the recomputed and the observed gradient; inf where it could not be recomputed."""
    times: Tensor | None
    """(n,) how often each input occurs in the batch, as far as its share of the gradient tells"""
    status: ExactStatus
    separation: Unmixing
    noise: Tensor
    """(n,) standard deviation of the noise that the gradient's noise leaves in each input"""


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


def exact_batch(
    weight_grad: Tensor,
    bias_grad: Tensor | None,
    behind: Behind,
    *,
    components: int | None = None,
    image_shape: Sequence[int] | None = None,
    objective: StudentICA | CocktailObjective | None = None,
    iterations: int = 25,
    progress: Progress | None = None,
) -> ExactBatch:
    """The inputs (n, d) of a dense layer, exactly where the layer has redundancy, and their labels.

    The arguments are those of `unmix`; `behind` is the network with its parameters. What comes back is never worse
    than the separation by the measure of the certificate.
    """
    objective = objective or StudentICA()
    mixture = usable_mixture(weight_grad, bias_grad, components)
    reason = _why_not(mixture, behind)
    if mixture is None or bias_grad is None or mixture.bias is None:
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, objective, progress)
        nobody = torch.zeros(len(separation.sources), dtype=torch.bool, device=weight_grad.device)
        reason = reason or ExactStatus.NO_BIAS
        return ExactBatch(
            separation.sources, None, False, nobody, torch.inf, None, reason, separation, separation.noise
        )
    problem = _problem(mixture, behind, weight_grad, bias_grad, image_shape)
    for attempt in _attempts(objective, mixture, reason):
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, attempt, progress)
        best = _equalise(problem, _assess(problem, _start(separation.rows)))
        status, confirmed = reason, torch.zeros(mixture.size, dtype=torch.bool, device=weight_grad.device)
        if status is None:
            separated, best = best, _confirm_all(problem, best, iterations, progress)
            confirmed = _confirmed(problem, best)
            if problem.responses_change is not None and int(confirmed.sum()) < NEARLY_ALL * len(confirmed):
                # Over several steps nothing but confirmation speaks for the columns, and one wrong one spoils others.
                best, confirmed = separated, torch.zeros_like(confirmed)
            status = _verdict(problem, best, confirmed, weight_grad.dtype)
        if status in (ExactStatus.EXACT, ExactStatus.CONFIRMED):
            break
    return ExactBatch(
        (best.state.rows @ mixture.coordinates).to(weight_grad.dtype),
        best.labels,
        status is ExactStatus.EXACT,
        confirmed,
        best.whole_residual,
        best.times,
        status or ExactStatus.UNCONFIRMED,
        separation,
        mixture.noise * best.state.rows.norm(dim=1),
    )


def _attempts(
    objective: StudentICA | CocktailObjective, mixture: Mixture, reason: ExactStatus | None
) -> list[StudentICA | CocktailObjective]:
    """A coarse separation is start enough where there is redundancy to spare; it costs a fraction of the full one."""
    plenty = 2 * mixture.size <= mixture.basis.shape[0]
    if reason is not None or not plenty or not isinstance(objective, StudentICA):
        return [objective]
    return [replace(objective, iterations=QUICK_ITERATIONS, places=QUICK_PLACES), objective]


def _why_not(mixture: Mixture | None, behind: Behind) -> ExactStatus | None:
    """Why the exact stage cannot be tried."""
    if mixture is None:
        return ExactStatus.EMPTY
    if mixture.bias is None:
        return ExactStatus.NO_BIAS
    if not is_rectified(behind.network, behind.bias.double()):
        return ExactStatus.NOT_RECTIFIED
    units = mixture.basis.shape[0]
    return ExactStatus.NO_REDUNDANCY if units < mixture.size + SPARE_UNITS else None


class _Problem(NamedTuple):
    mixture: Mixture
    behind: Behind
    complement: Tensor
    """(h, h - n): the directions that the columns do not span"""
    contrasts: Tensor
    """(n, groups, places) of the coordinates"""
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


class _State(NamedTuple):
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


class _Assessment(NamedTuple):
    state: _State
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


def _problem(
    mixture: Mixture,
    behind: Behind,
    weight_grad: Tensor,
    bias_grad: Tensor,
    image_shape: Sequence[int] | None,
) -> _Problem:
    both = torch.cat([mixture.coordinates, (mixture.basis.T @ bias_grad.double()).unsqueeze(1)], dim=1)
    energy = weight_grad.double().square().sum() + bias_grad.double().square().sum()
    complete = torch.linalg.qr(mixture.basis, mode="complete").Q
    change = behind.weight_change
    return _Problem(
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
    )


def _start(rows: Tensor) -> _State:
    columns = _unit(torch.linalg.pinv(rows).T)
    return _State(rows, columns, rows.new_full((len(rows),), torch.inf))


def _confirm_all(problem: _Problem, best: _Assessment, iterations: int, progress: Progress | None) -> _Assessment:
    """Find columns round by round. A column found is kept and projected out, which clears up the others.

    Where nothing moves any more, all columns are looked for again, then worse fits are let through.
    """
    state, again = best.state, False
    tolerance = CONFIRMED if _bias_is_trusted(problem, state) else NOISY
    for iteration in range(iterations):
        before = state
        state = _find(problem, state, tolerance, again)
        state = _resolve_others(problem, _without_repeats(state), tolerance)
        assessment = _equalise(problem, _assess(problem, state))
        state = assessment.state
        misfit, least = _misfit(problem, assessment), _misfit(problem, best)
        if _preference(problem, assessment) < _preference(problem, best):
            best = assessment
        if progress is not None:
            progress(iteration + 1, iterations)
        gained = int(state.found(tolerance).sum()) > int(before.found(tolerance).sum())
        refined = misfit < 0.8 * least or bool((state.residuals < 0.5 * before.residuals).any())
        complete = bool(state.found(tolerance).all())
        if assessment.residual < problem.finished or (
            again and not gained and not refined and (complete or tolerance >= LOOSEST)
        ):
            break
        hopeless = iteration >= 4 and float(state.found(CERTAIN).double().mean()) < 0.5
        if problem.responses_change is not None and (hopeless or (again and not gained)):
            break  # a loose fit to an average is worth nothing
        if again and not gained and not complete:
            tolerance = min(LOOSENING * tolerance, LOOSEST)
        again = not gained or complete
    return best


def _find(problem: _Problem, state: _State, tolerance: float, again: bool) -> _State:
    """Look for the columns that are not found yet, or `again` for all of them."""
    everyone = torch.arange(len(state.rows), device=state.rows.device)
    todo = everyone if again else everyone[~state.found(tolerance)]
    # Signals have the last word where their corrections leave nothing out, or where only refinement is left.
    decisive = problem.few_classes or bool(state.confirmed.all())
    refining = CONFIRMED if again and decisive else 0.0
    activations, margins = _activations(problem, state.rows[todo])
    scale = activations.std(1, keepdim=True).clamp(min=torch.finfo(activations.dtype).tiny)
    surety = (margins / scale).clamp(0, 1)
    basis, rest = problem.mixture.basis, todo.new_ones(len(todo)).nonzero().flatten()
    if not refining or problem.responses_change is not None:
        # Cheap, and needs no signals; but samples that are much alike can blend where a unit is misjudged.
        found = silent_columns(basis, torch.where(activations < 0, surety, 0), state.columns[todo])
        state = _replace(state, todo, found, refining)
        rest = (found.residuals >= tolerance).nonzero().flatten()
    if len(rest):
        behind = problem.behind
        entries = _signed_columns(state)[todo[rest]] @ basis.T
        labels = candidate_labels(behind.network, behind.loss, activations[rest], entries)
        signals, directions = correction_directions(behind.network, behind.loss, activations[rest], labels)
        weights = surety[rest].clamp(min=0.02)
        if problem.responses_change is not None:
            # Over several steps zeros stay zeros, while signals are averages that the middle only approximates.
            weights = torch.where(activations[rest] < 0, weights, DRIFTING * weights)
        fitted = signal_columns(basis, problem.complement, weights, signals, directions)
        if problem.responses_change is not None:
            fitted = fitted._replace(residuals=fitted.residuals.clamp(min=CONFIRMED))  # an average confirms nothing
        state = _replace(state, todo[rest], fitted, refining)
    return state


def _activations(problem: _Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-activations (samples, h) of unmixed inputs, and how far each stays from zero during local training."""
    activations = rows @ problem.responses.T + problem.behind.bias.double()
    if problem.responses_change is None or problem.behind.bias_change is None:
        return activations, activations.abs()
    change = rows @ problem.responses_change.T + problem.behind.bias_change.double()
    return activations, (activations.abs() - change.abs() / 2).clamp(min=0)


def _replace(state: _State, which: Tensor, found: Columns, tolerance: float) -> _State:
    """Take over the columns that fit better than those before, or fit as well and come from better estimates."""
    better = (found.residuals < state.residuals[which]) | (found.residuals < tolerance)
    columns, residuals = state.columns.clone(), state.residuals.clone()
    columns[which[better]] = found.columns[better]
    residuals[which[better]] = found.residuals[better]
    return state._replace(columns=columns, residuals=residuals)


def _without_repeats(state: _State) -> _State:
    """Where two estimates ended at one column, only the better one keeps it."""
    order = state.residuals.argsort()
    ordered = state.columns[order]
    same = (ordered @ ordered.T).abs() > SAME
    found = state.residuals[order].isfinite()
    repeated = torch.zeros_like(found)
    repeated[order] = (same.tril(-1) & found.unsqueeze(0)).any(1) & found
    return state._replace(residuals=torch.where(repeated, torch.inf, state.residuals))


def _resolve_others(problem: _Problem, state: _State, tolerance: float) -> _State:
    """New unmixing rows: confirmed columns as they are, the others separated anew with those projected out."""
    known = state.found(tolerance)
    if bool(known.all()):
        rows = torch.linalg.pinv(state.columns.T)
        return state._replace(rows=scale_rows(rows, problem.mixture))
    signals = problem.contrasts.flatten(1)
    outside = torch.linalg.qr(state.columns[known].T, mode="complete").Q[:, int(known.sum()) :]
    start = torch.linalg.pinv(outside.T @ torch.linalg.pinv(state.rows)[:, ~known])
    left = (outside.T @ signals).view(-1, *problem.contrasts.shape[1:])
    unmixed = separate_by_likelihood(StudentICA(), left, start=start) @ outside.T @ signals
    # Columns of the others by regression: their sources are taken to be uncorrelated with the confirmed ones.
    columns = state.columns.clone()
    columns[~known] = _unit(torch.linalg.solve(unmixed @ unmixed.T, unmixed @ signals.T))
    return state._replace(rows=scale_rows(torch.linalg.pinv(columns.T), problem.mixture), columns=columns)


def _unit(rows: Tensor) -> Tensor:
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny)


def _assess(problem: _Problem, state: _State) -> _Assessment:
    """Recompute the gradient from the inputs; how much each of them counts is fitted.

    |[G | g] - sum_i s_i v_i [x_i | 1]|^2 needs only products of the signals v with L and of the coordinates with each
    other, so that the d features are not touched.
    """
    behind, rows = problem.behind, state.rows
    activations, _ = _activations(problem, rows)
    entries = _signed_columns(state) @ problem.mixture.basis.T
    labels = candidate_labels(behind.network, behind.loss, activations, entries)
    activations = _settle(activations, entries)
    signals = sample_signals(behind.network, behind.loss, activations, labels)
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
    return _Assessment(state, labels, shares, times.long(), signals, *residuals)


def _signed_columns(state: _State) -> Tensor:
    """The columns, each pointing the way that its row, which has the sign of the input, counts as positive."""
    return torch.where((state.rows * state.columns).sum(1, keepdim=True) < 0, -state.columns, state.columns)


def _settle(activations: Tensor, entries: Tensor) -> Tensor:
    """Put units that are too close to their threshold to call on the side that their column's entry shows."""
    scale = activations.std(1, keepdim=True)
    silent = entries.abs() < SILENT * entries.abs().mean(1, keepdim=True)
    wrong = (activations.abs() < UNDECIDED * scale) & (silent == (activations > 0))
    barely = torch.finfo(activations.dtype).eps * scale
    return torch.where(wrong, torch.where(silent, -barely, barely), activations)


def _equalise(problem: _Problem, best: _Assessment) -> _Assessment:
    """Correct the inputs' sizes so that all count the same, where the gradient is explained better then.

    The bias gradient gives sizes exactly, but it is small, and noise upsets it before anything else: then this helps.
    An input that is too large by some factor is found to count less by that factor.
    """
    if _bias_is_trusted(problem, best.state) or problem.responses_change is not None:
        return best
    for _ in range(EQUALISATIONS):
        # Half of the correction at a time: the signals change with the size as well.
        sizes = (best.shares / best.shares.median()).clamp(1 / LOUDEST, LOUDEST).sqrt()
        if not bool(sizes.isfinite().all()):
            break
        rows = _common_size(best.state.rows * sizes.unsqueeze(1), problem.mixture)
        resized = _assess(problem, best.state._replace(rows=rows))
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


def _preference(problem: _Problem, assessment: _Assessment) -> tuple[int, float]:
    """The smaller, the better. Over several local steps what the silent units confirm counts, not the gradient."""
    confirmed = int(assessment.state.confirmed.sum()) if problem.responses_change is not None else 0
    return -confirmed, _misfit(problem, assessment)


def _misfit(problem: _Problem, assessment: _Assessment) -> float:
    """What tells the better of two answers. Where sizes are uncertain they must not be fitted away."""
    trusted = _bias_is_trusted(problem, assessment.state)
    return assessment.residual if trusted else assessment.even_residual


def _bias_is_trusted(problem: _Problem, state: _State) -> bool:
    return problem.mixture.noise * float(state.rows.norm(dim=1).median()) < TRUSTED_BIAS


def _confirmed(problem: _Problem, best: _Assessment) -> Tensor:
    """Which inputs are confirmed (n,): redundant units agree on the column and, after one step, so does the signal.

    Nothing is, where noise is nearly as strong as the weakest sample: then the columns' space itself is uncertain.
    """
    if problem.mixture.overlap > MOST_OVERLAP:
        return torch.zeros_like(best.state.confirmed)
    if problem.responses_change is not None:
        return best.state.found(CERTAIN)
    entries = _unit(_signed_columns(best.state) @ problem.mixture.basis.T)
    apart: Tensor = (entries - _unit(best.signals)).norm(dim=1)
    return best.state.confirmed & (apart < CONFIRMED)


def _verdict(problem: _Problem, best: _Assessment, confirmed: Tensor, dtype: torch.dtype) -> ExactStatus:
    if best.whole_residual < EXPLAINED[dtype == torch.float64]:
        return ExactStatus.EXACT
    if bool(best.state.found(CERTAIN).all()) and problem.responses_change is not None:
        return ExactStatus.CONFIRMED
    return ExactStatus.PARTIAL if bool(confirmed.any()) else ExactStatus.UNCONFIRMED
