"""The exact stage: from approximate inputs of a dense layer to the inputs themselves, with proof.

[G | g] = A [X | 1]. Separation (`ica.unmix`) finds X only statistically. But the columns of A are not arbitrary: behind
a ReLU, entry j of sample i's column is exactly zero where unit j is silent for x_i, and elsewhere it is the signal that
the network behind sends back. An approximate x_i tells nearly all of that, and a column in a known n-dimensional space
is over-determined by it (`columns`). From the columns follow the inputs, by one small inverse.

The certificate: the gradient recomputed from the recovered inputs and labels, compared with the observed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.closed_form.dense import least_squares
from fedprism.solvers.matching.gradients import Progress
from fedprism.solvers.separation.certificate import (
    CONFIRMED,
    Assessment,
    Downstream,
    Problem,
    State,
    assess,
    bias_is_trusted,
    equalise,
    misfit_of,
    pre_activations,
    unit_rows,
)
from fedprism.solvers.separation.columns import SPARE_UNITS, Columns, signal_columns, silent_columns
from fedprism.solvers.separation.ica import (
    Box,
    Separator,
    StudentICA,
    Unmixing,
    boxed_rows,
    scale_rows,
    separate_by_likelihood,
    unmix_mixture,
    usable_mixture,
)
from fedprism.solvers.separation.mixture import Mixture
from fedprism.solvers.separation.signals import candidate_labels, correction_directions, fitting_labels, is_rectified

CERTAIN = 3e-4
"""What stands for `CONFIRMED` where only silent units can confirm a column."""
NEARLY_ALL = 0.95
"""Fraction of the columns that silent units must confirm to speak for an answer that the gradient does not."""
MAJORITY = 0.5
"""The same after several local steps, of which no recomputation says anything."""
SAME_COLUMN = 0.99
"""Cosine of two columns above which they are one."""
MOST_PASSES = 25
"""Most passes over the columns."""
QUICK_ITERATIONS = 25
"""Most steps of the coarse separation that is tried first."""
QUICK_PLACES = 1000
"""Pixels that the coarse separation looks at."""
SINGLE_ROUNDING = 1e-5
"""Residual below which a gradient in single precision or less is explained to rounding error."""
DOUBLE_ROUNDING = 1e-6
"""The same for a gradient in double precision."""
ROUNDINGS = 2.0
"""How many times a rounding error of known size the residual of a proven answer may be."""
PROVEN = 0.01
"""Fraction of what the quietest input adds to the gradient, above which a residual leaves that input open."""
UNEXPLAINED = 0.3
"""Residual, relative to the gradient, above which it does not tell one answer from another."""
CLEARLY_BETTER = 0.95
"""Fraction of the separation's residual that an answer in its place may leave at most."""
HALF_EXPLAINED = 0.7
"""Residual of half of the gradient's energy: an answer in place of the separation, all inputs counting the same."""
NOISY_TOLERANCE = 0.3
"""What a column may misfit in a noisy gradient, relative to its mean entry."""
LOOSENING = 4.0
"""Factor by which the tolerance for a misfit grows where nothing else is found."""
LOOSEST = 2.0
"""The tolerance at which any fit will do."""
REFINED_RESIDUAL = 0.8
"""Factor by which the best misfit must fall for a pass to have refined the answer."""
REFINED_COLUMN = 0.5
"""Factor by which a single column's misfit must fall for the same."""
DRIFTING_PASSES = 5
"""Passes after which most columns must be certain if there were several local steps."""
LEAST_SURETY = 0.02
"""Weight of a unit at its threshold, relative to one a standard deviation away."""
DRIFTING = 0.05
"""Weight of a unit that is not silent in an update of several local steps."""
CLEARING_TAILS = (0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4, 1e-4, 1e-4)
"""Powers, relative to the mean, below which what is left of a source counts as nothing; one reweighting per entry."""


class ExactStatus(StrEnum):
    EXACT = "the gradient recomputed from the inputs is the observed one to rounding error"
    CONFIRMED = "every input is confirmed by the units it leaves silent; several local steps allow no recomputation"
    INEXACT = "every input's signal is confirmed, but the recomputed gradient is off by more than rounding error"
    PARTIAL = "some inputs' signals are confirmed, the others are not, and what is wrong in those blends into all"
    MISCOUNTED = "the inputs explain the gradient to rounding error, but the batch has more: some leave no trace in it"
    UNEVEN = "the inputs explain the gradient to rounding error, but with unequal weights"
    FULL = "as many inputs as the layer has units that react, or more: separated, and blended if there are more"
    NO_REDUNDANCY = "the layer has too few units beyond the batch size to confirm anything; separated statistically"
    NOISE_FLOOR = (
        "what is left of the gradient is nearly as strong as the weakest of the inputs; separated statistically"
    )
    UNCONFIRMED = "no input could be confirmed; separated statistically"
    NO_BIAS = "without the gradient of the layer's bias scale and sign are unknown; separated statistically"
    NOT_RECTIFIED = "no ReLU follows the layer, so no unit is silent; separated statistically"
    EMPTY = "the gradient is zero or not finite: nothing to separate"


SETTLED = {ExactStatus.EXACT, ExactStatus.MISCOUNTED, ExactStatus.UNEVEN, ExactStatus.CONFIRMED}
"""No better separation to start from would add anything."""


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
    """(n,) how often each input occurs in the batch, as far as its part of the gradient tells"""
    status: ExactStatus
    separation: Unmixing
    noise: Tensor
    """(n,) standard deviation of the noise that the gradient's noise leaves in each input"""


def exact_batch(
    weight_grad: Tensor,
    bias_grad: Tensor | None,
    downstream: Downstream,
    *,
    components: int | None = None,
    image_shape: Sequence[int] | None = None,
    box: Box | None = None,
    objective: Separator = StudentICA(),  # noqa: B008 (frozen)
    rounding: float = 0.0,
    progress: Progress | None = None,
) -> ExactBatch:
    """The inputs (n, d) of a dense layer, exactly where the layer has redundancy, and their labels.

    The arguments are those of `unmix`, and `rounding`: relative size of the gradient's rounding error where it is more
    than that of its precision.
    """
    mixture = usable_mixture(weight_grad, bias_grad, components)
    reason = _why_not(mixture, downstream, components)
    if mixture is None or bias_grad is None or mixture.bias is None:
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, objective, progress, box)
        reason, inputs = reason or ExactStatus.NO_BIAS, separation.sources
        nobody = torch.zeros(len(inputs), dtype=torch.bool, device=weight_grad.device)
        return ExactBatch(inputs, None, False, nobody, torch.inf, None, reason, separation, separation.noise)
    problem = Problem(
        mixture=mixture, downstream=downstream, gradient=(weight_grad, bias_grad), image_shape=image_shape, box=box
    )
    unavoidable = DOUBLE_ROUNDING if weight_grad.dtype == torch.float64 else SINGLE_ROUNDING
    rounding = max(unavoidable, ROUNDINGS * rounding)
    for attempt in _attempts(objective, mixture, reason):
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, attempt, progress, box)
        start = State.unconfirmed(separation.rows, unit_rows(torch.linalg.pinv(separation.rows).T))
        separated = best = assess(problem, start)
        status, confirmed = reason, start.confirmed
        if status is None:
            best, confirmed = _credible(problem, _confirm_all(problem, separated, progress), separated)
            status = _verdict(problem, best, confirmed, components, rounding)
            if status not in SETTLED and best is not separated and box is not None:
                best = assess(problem, best.state._replace(rows=boxed_rows(best.state.rows, mixture, box)))
        if status in SETTLED:
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


def _attempts(objective: Separator, mixture: Mixture, reason: ExactStatus | None) -> list[Separator]:
    """A coarse separation is start enough where there is redundancy to spare; it costs a fraction of the full one."""
    plenty = 2 * mixture.size <= mixture.basis.shape[0]
    if reason is not None or not plenty or not isinstance(objective, StudentICA):
        return [objective]
    return [replace(objective, iterations=QUICK_ITERATIONS, places=QUICK_PLACES), objective]


def _why_not(mixture: Mixture | None, downstream: Downstream, components: int | None) -> ExactStatus | None:
    """Why the exact stage cannot be tried."""
    if mixture is None:
        return ExactStatus.EMPTY
    if mixture.bias is None:
        return ExactStatus.NO_BIAS
    if not is_rectified(downstream.network, downstream.bias.double()):
        return ExactStatus.NOT_RECTIFIED
    if mixture.is_full(components) and components != mixture.live_units:
        return ExactStatus.FULL
    return ExactStatus.NO_REDUNDANCY if mixture.live_units < mixture.size + SPARE_UNITS else None


class _Pass(NamedTuple):
    """What one pass over the columns starts from, and which columns it looks for."""

    state: State
    tolerance: float
    """The misfit below which a column is kept, and projected out, which clears up the others."""
    refit: bool = False
    """Whether columns that fit are looked for again as well."""
    separated_beside: float = MAJORITY
    """The fraction of certain columns beside which the others were separated anew."""


def _confirm_all(problem: Problem, separated: Assessment, progress: Progress | None) -> Assessment:
    """The best answer of all passes over the columns; what was separated where no pass finds a better one."""
    state, best = equalise(problem, separated).state, separated
    current = _Pass(state, CONFIRMED if bias_is_trusted(problem, state) else NOISY_TOLERANCE)
    for number in range(1, MOST_PASSES + 1):
        fitted = _without_repeats(_fit_columns(problem, current))
        answer = equalise(problem, assess(problem, _resolve_others(problem, fitted, current.tolerance)))
        following = _next_pass(problem, current, answer, number, misfit_of(problem, best))
        if _is_better(problem, answer, best, separated):
            best = answer
        if progress is not None:
            progress(number, MOST_PASSES)
        if following is None:
            break
        current = following
    return best


def _next_pass(problem: Problem, current: _Pass, answer: Assessment, number: int, least: float) -> _Pass | None:
    """The pass after the one that gave this answer, None where none would add anything; least: the misfit before.

    Where nothing moves any more, all columns are looked for again, then worse fits are let through.
    """
    state, tolerance = answer.state, current.tolerance
    fitting, certain = state.fitting(tolerance), float(state.fitting(CERTAIN).double().mean())
    gained = int(fitting.sum()) > int(current.state.fitting(tolerance).sum())
    idle, complete = current.refit and not gained, bool(fitting.all())
    closer = state.residuals < REFINED_COLUMN * current.state.residuals
    refined = misfit_of(problem, answer) < REFINED_RESIDUAL * least or bool(closer.any())
    if answer.residual < problem.finished or (idle and (complete or tolerance >= LOOSEST) and not refined):
        return None
    if problem.several_steps and (idle or (number >= DRIFTING_PASSES and certain < MAJORITY)):
        return None  # a loose fit to an average is worth nothing
    if not idle or complete:
        return current._replace(state=state, refit=not gained or complete)
    if certain > current.separated_beside:
        # What fits nearly leaves more of itself in the others than a quiet sample has: it is separated with them.
        residuals = torch.where(state.fitting(CERTAIN), state.residuals, torch.inf)
        return _Pass(_resolve_others(problem, state._replace(residuals=residuals), CERTAIN), tolerance, False, certain)
    return current._replace(state=state, tolerance=min(LOOSENING * tolerance, LOOSEST))


def _fit_columns(problem: Problem, current: _Pass) -> State:
    """Columns by the units they leave silent, and where these do not tell, by the signals they equal."""
    state, numbers = current.state, torch.arange(len(current.state.rows), device=current.state.rows.device)
    chosen = numbers if current.refit else numbers[~state.fitting(current.tolerance)]
    activations, margins = pre_activations(problem, state.rows[chosen])
    scale = activations.std(1, keepdim=True).clamp(min=torch.finfo(activations.dtype).tiny)
    surety = (margins / scale).clamp(0, 1)
    # Signals have the last word where their corrections leave nothing out, or where only refinement is left.
    decisive = problem.few_classes or bool(state.confirmed.all())
    refining = CONFIRMED if current.refit and decisive else 0.0
    # Of many classes they leave something out: where enough units are silent, these know better.
    silence = CERTAIN if current.refit and not problem.several_steps and not problem.few_classes else 0.0
    if silence or not refining or problem.several_steps:
        # Cheap, and needs no signals; but samples that are much alike can blend where a unit is misjudged.
        beliefs = torch.where(activations < 0, surety, 0)
        columns = silent_columns(problem.mixture.basis, beliefs, state.columns[chosen], unaided=problem.several_steps)
        state = _replace(state, chosen, columns, silence or refining)
        unfitted = columns.residuals >= (silence or current.tolerance)
        chosen, activations, surety = chosen[unfitted], activations[unfitted], surety[unfitted]
    if len(chosen):
        columns = _columns_by_signals(problem, current._replace(state=state), chosen, activations, surety)
        state = _replace(state, chosen, columns, refining)
    return state


def _columns_by_signals(
    problem: Problem, current: _Pass, chosen: Tensor, activations: Tensor, surety: Tensor
) -> Columns:
    downstream, basis, state = problem.downstream, problem.mixture.basis, current.state
    labels = candidate_labels(downstream.network, downstream.loss, activations, state.signed_columns[chosen] @ basis.T)
    if current.refit:
        # Where nothing came of the estimated column, it is no guide to the label either.
        others = fitting_labels(downstream.network, downstream.loss, activations, problem.complement)
        labels = torch.where(state.fitting(current.tolerance)[chosen], labels, others)
    signals, directions = correction_directions(downstream.network, downstream.loss, activations, labels)
    weights = surety.clamp(min=LEAST_SURETY)
    if problem.several_steps:
        # Zeros stay zeros, while signals are averages that the middle only approximates.
        weights = torch.where(activations < 0, weights, DRIFTING * weights)
    columns = signal_columns(basis, problem.complement, weights, signals, directions)
    if problem.several_steps:
        columns = columns._replace(residuals=columns.residuals.clamp(min=CONFIRMED))  # an average confirms nothing
    return columns


def _replace(state: State, chosen: Tensor, fits: Columns, tolerance: float) -> State:
    """Take over the columns that fit better than those before, or fit as well and come from better estimates."""
    better = (fits.residuals < state.residuals[chosen]) | (fits.residuals < tolerance)
    columns, residuals = state.columns.clone(), state.residuals.clone()
    columns[chosen[better]] = fits.columns[better]
    residuals[chosen[better]] = fits.residuals[better]
    return state._replace(columns=columns, residuals=residuals)


def _without_repeats(state: State) -> State:
    """Where two estimates ended at one column, only the better one keeps it."""
    order = state.residuals.argsort()
    ordered = state.columns[order]
    same = (ordered @ ordered.T).abs() > SAME_COLUMN
    fitted = state.residuals[order].isfinite()
    repeated = torch.zeros_like(fitted)
    repeated[order] = (same.tril(-1) & fitted.unsqueeze(0)).any(1) & fitted
    return state._replace(residuals=torch.where(repeated, torch.inf, state.residuals))


def _resolve_others(problem: Problem, state: State, tolerance: float) -> State:
    """New unmixing rows: confirmed columns as they are, the others separated anew with those projected out."""
    known = state.fitting(tolerance)
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
    columns[~known] = unit_rows(least_squares(unmixed @ unmixed.T, unmixed @ signals.T))
    rows = torch.linalg.pinv(columns.T)
    if problem.several_steps and int(known.sum()) > MAJORITY * len(known):
        # Over several steps no signal corrects that: see to it that little of them is left in the confirmed ones.
        rows[known] = _cleared(problem.contrasts, rows[known], rows[~known])
        columns = unit_rows(torch.linalg.pinv(rows).T)
        columns[known] = state.columns[known]
    return state._replace(rows=scale_rows(rows, problem.mixture, problem.box), columns=columns)


def _cleared(mixtures: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """`rows` less as much of the `others` as makes their sources sparsest: regression with a Student-t residual."""
    grid = mixtures.shape[1], mixtures[0, 0].numel()
    sources, rest = ((chosen @ mixtures.flatten(1)).view(-1, *grid) for chosen in (rows, others))
    mean_power = sources.square().sum(1).mean(1, keepdim=True)
    left, amounts = sources, rows.new_zeros(len(rows), len(others))
    for tail in CLEARING_TAILS:
        weights = 1 / (tail + left.square().sum(1) / mean_power)
        for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
            weighted = (rest * weight).flatten(1)
            products = (weighted @ source.flatten()).unsqueeze(1)
            amounts[number] = least_squares(weighted @ rest.flatten(1).T, products).squeeze(1)
        left = sources - (amounts @ rest.flatten(1)).view_as(sources)
    return rows - amounts @ others


def _is_better(problem: Problem, new: Assessment, old: Assessment, separated: Assessment) -> bool:
    """By how well the gradient is explained; where that says little, by what the silent units confirm.

    Sizes alone explain some noise: where much is left unexplained, only sizes at which all inputs count the same speak
    for an answer.
    """
    misfits = misfit_of(problem, new), misfit_of(problem, old)
    if problem.several_steps:  # the gradient of no single step is known
        confirmed = [int(answer.state.confirmed.sum()) for answer in (new, old)]
    elif min(misfits) > UNEXPLAINED and not problem.mixture.is_drowned:  # the network is not the trained one (dropout)
        confirmed = [float(answer.state.fitting(CERTAIN).double().mean()) > NEARLY_ALL for answer in (new, old)]
    else:
        confirmed = [0, 0]
    clearly = new.residual < CLEARLY_BETTER * separated.residual
    credible = new.residual < UNEXPLAINED or new.even_residual < HALF_EXPLAINED
    if not problem.several_steps and not confirmed[0] and not (clearly and credible):
        return False
    return (-confirmed[0], misfits[0]) < (-confirmed[1], misfits[1])


def _credible(problem: Problem, best: Assessment, separated: Assessment) -> tuple[Assessment, Tensor]:
    """An answer and which of its inputs redundant units confirm (n,); after one step their signals must agree."""
    nobody = torch.zeros_like(best.state.confirmed)
    if problem.several_steps:
        confirmed = nobody if problem.mixture.is_drowned else best.state.fitting(CERTAIN)
        # Nothing but confirmation speaks for the columns.
        return (separated, nobody) if int(confirmed.sum()) < MAJORITY * len(confirmed) else (best, confirmed)
    if problem.mixture.is_drowned:
        return best, nobody
    entries = best.state.signed_columns @ problem.mixture.basis.T
    gaps = (unit_rows(entries) - unit_rows(best.signals)).norm(dim=1)
    return best, best.state.confirmed & (gaps < CONFIRMED)


def _verdict(
    problem: Problem, best: Assessment, confirmed: Tensor, components: int | None, rounding: float
) -> ExactStatus:
    proven = min(rounding, PROVEN * best.weakest)
    if best.whole_residual < proven:
        complete = components is None or int(best.times.sum()) == components
        return ExactStatus.EXACT if complete else ExactStatus.MISCOUNTED
    if best.residual < proven:
        return ExactStatus.UNEVEN
    if bool(best.state.fitting(CERTAIN).all()) and problem.several_steps:
        return ExactStatus.CONFIRMED
    if bool(confirmed.any()):
        return ExactStatus.INEXACT if bool(confirmed.all()) else ExactStatus.PARTIAL
    return ExactStatus.NOISE_FLOOR if problem.mixture.is_drowned else ExactStatus.UNCONFIRMED
