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

from .assessment import (
    CONFIRMED,
    Assessment,
    Behind,
    Problem,
    State,
    assess,
    bias_is_trusted,
    equalise,
    misfit_of,
    pre_activations,
    problem_of,
    signed_columns,
    unit_rows,
)
from .columns import SPARE_UNITS, Columns, signal_columns, silent_columns
from .dense import least_squares
from .ica import (
    Box,
    StudentICA,
    Unmixing,
    boxed_rows,
    scale_rows,
    separate_by_likelihood,
    unmix_mixture,
    usable_mixture,
)
from .matching import Progress
from .mixture import Mixture
from .published import CocktailObjective
from .signals import candidate_labels, correction_directions, fitting_labels, is_rectified

__all__ = ["Behind", "ExactBatch", "ExactStatus", "exact_batch"]

CERTAIN, NEARLY_ALL, MOST = 3e-4, 0.95, 0.5
"""What stands for `CONFIRMED` where only silent units can confirm, and how many must be confirmed to be of use: where
the gradient says otherwise, and where it says nothing (several local steps)."""
MOST_OVERLAP = 0.1
"""Noise relative to the weakest sample above which nothing counts as confirmed."""
SAME = 0.99
"""Columns with a larger cosine are one."""
QUICK_ITERATIONS, QUICK_PLACES = 25, 1000
"""Effort of the coarse separation that is tried first."""
EXPLAINED, ROUNDINGS, PROVEN = {False: 1e-5, True: 1e-6}, 2.0, 0.01
"""Residuals below this are rounding error, for gradients in single and in double precision, or so many times the
rounding error that is known to be there; and they must be below this share of what the quietest input adds to the
gradient, or that input could be anything."""
UNEXPLAINED = 0.3
"""Residuals above this tell no answer from another."""
CLEARLY, HALF = 0.95, 0.7
"""The share of the separation's residual below which an answer is clearly better, and a residual that no answer in
place of the separation may exceed: it explains less than half of the gradient's energy."""
DRIFTING = 0.05
"""Weight of a unit that is not silent in an update of several local steps."""
NOISY = 0.3
"""What a column may misfit in a noisy gradient."""
LOOSENING, LOOSEST = 4.0, 2.0
"""By how much the tolerance for a fit grows where nothing else is found, and where it ends: with any fit at all."""


CLEARING_TAILS = (0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4, 1e-4, 1e-4)
"""Powers, relative to the mean, below which what is left of a source counts as nothing; one reweighting each."""


class ExactStatus(StrEnum):
    EXACT = "the gradient recomputed from the inputs is the observed one to rounding error"
    CONFIRMED = "every input is confirmed by the units it leaves silent; several local steps allow no recomputation"
    INEXACT = "every input's signal is confirmed, but the recomputed gradient is off by more than rounding error"
    PARTIAL = "some inputs' signals are confirmed, the others are not, and what is wrong in those blends into all"
    MISCOUNTED = "the inputs explain the gradient to rounding error, but the batch has more: some leave no trace in it"
    UNEVEN = "the inputs explain the gradient to rounding error, but count differently: clipped, or of unequal clients"
    FULL = "as many inputs as the layer has units that react, or more: separated, and blended if there are more"
    NO_REDUNDANCY = "the layer has too few units beyond the batch size to confirm anything; separated statistically"
    NOISE_FLOOR = (
        "noise, or further inputs, are nearly as strong in the gradient as the weakest; separated statistically"
    )
    UNCONFIRMED = "no input could be confirmed (a defense, or samples much alike); separated statistically"
    NO_BIAS = "without the gradient of the layer's bias scale and sign are unknown; separated statistically"
    NOT_RECTIFIED = "no ReLU follows the layer, so that no unit is silent; separated statistically"
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
    """(n,) how often each input occurs in the batch, as far as its share of the gradient tells"""
    status: ExactStatus
    separation: Unmixing
    noise: Tensor
    """(n,) standard deviation of the noise that the gradient's noise leaves in each input"""


def exact_batch(
    weight_grad: Tensor,
    bias_grad: Tensor | None,
    behind: Behind,
    *,
    components: int | None = None,
    image_shape: Sequence[int] | None = None,
    box: Box | None = None,
    objective: StudentICA | CocktailObjective | None = None,
    iterations: int = 25,
    rounding: float = 0.0,
    progress: Progress | None = None,
) -> ExactBatch:
    """The inputs (n, d) of a dense layer, exactly where the layer has redundancy, and their labels.

    The arguments are those of `unmix`; `behind` is the network with its parameters. `rounding`: relative size of the
    gradient's rounding error where it is more than that of its precision, as in the difference of two models. What
    comes back explains the gradient better than the separation does, or silent units confirm it where nothing explains
    the gradient.
    """
    objective = objective or StudentICA()
    mixture = usable_mixture(weight_grad, bias_grad, components)
    reason = _why_not(mixture, behind, components)
    if mixture is None or bias_grad is None or mixture.bias is None:
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, objective, progress, box)
        nobody = torch.zeros(len(separation.sources), dtype=torch.bool, device=weight_grad.device)
        reason = reason or ExactStatus.NO_BIAS
        return ExactBatch(
            separation.sources, None, False, nobody, torch.inf, None, reason, separation, separation.noise
        )
    problem = problem_of(mixture, behind, weight_grad, bias_grad, image_shape, box)
    explained = max(EXPLAINED[weight_grad.dtype == torch.float64], ROUNDINGS * rounding)
    for attempt in _attempts(objective, mixture, reason):
        separation = unmix_mixture(mixture, weight_grad, components, image_shape, attempt, progress, box)
        separated = best = assess(problem, _start(separation.rows))
        status, confirmed = reason, torch.zeros(mixture.size, dtype=torch.bool, device=weight_grad.device)
        if status is None:
            best = _confirm_all(problem, separated, iterations, progress)
            confirmed = _confirmed(problem, best)
            if problem.responses_change is not None and int(confirmed.sum()) < MOST * len(confirmed):
                # Over several steps nothing but confirmation speaks for the columns.
                best, confirmed = separated, torch.zeros_like(confirmed)
            status = _verdict(problem, best, confirmed, components, explained)
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


def _attempts(
    objective: StudentICA | CocktailObjective, mixture: Mixture, reason: ExactStatus | None
) -> list[StudentICA | CocktailObjective]:
    """A coarse separation is start enough where there is redundancy to spare; it costs a fraction of the full one."""
    plenty = 2 * mixture.size <= mixture.basis.shape[0]
    if reason is not None or not plenty or not isinstance(objective, StudentICA):
        return [objective]
    return [replace(objective, iterations=QUICK_ITERATIONS, places=QUICK_PLACES), objective]


def _why_not(mixture: Mixture | None, behind: Behind, components: int | None) -> ExactStatus | None:
    """Why the exact stage cannot be tried."""
    if mixture is None:
        return ExactStatus.EMPTY
    if mixture.bias is None:
        return ExactStatus.NO_BIAS
    if not is_rectified(behind.network, behind.bias.double()):
        return ExactStatus.NOT_RECTIFIED
    if mixture.is_full(components) and components != mixture.live_units:
        return ExactStatus.FULL
    return ExactStatus.NO_REDUNDANCY if mixture.live_units < mixture.size + SPARE_UNITS else None


def _start(rows: Tensor) -> State:
    columns = unit_rows(torch.linalg.pinv(rows).T)
    return State(rows, columns, rows.new_full((len(rows),), torch.inf))


def _confirm_all(problem: Problem, separated: Assessment, iterations: int, progress: Progress | None) -> Assessment:
    """Find columns round by round. A column found is kept and projected out, which clears up the others.

    Where nothing moves any more, all columns are looked for again, then worse fits are let through. What was separated
    comes back as it is where nothing better is found.
    """
    best, state, again, separated_beside = separated, equalise(problem, separated).state, False, MOST
    tolerance = CONFIRMED if bias_is_trusted(problem, state) else NOISY
    for iteration in range(iterations):
        before = state
        state = _find(problem, state, tolerance, again)
        state = _resolve_others(problem, _without_repeats(state), tolerance)
        assessment = equalise(problem, assess(problem, state))
        state = assessment.state
        misfit, least = misfit_of(problem, assessment), misfit_of(problem, best)
        if _is_better(problem, assessment, best, separated):
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
        certain = float(state.found(CERTAIN).double().mean())
        if problem.responses_change is not None and ((iteration >= 4 and certain < MOST) or (again and not gained)):
            break  # a loose fit to an average is worth nothing
        stuck = again and not gained and not complete
        again = not gained or complete
        if stuck and certain > separated_beside:
            # What fits nearly leaves more of itself in the others than a quiet sample has: it is separated with them.
            state, again, separated_beside = _resolve_others(problem, _certain_only(state), CERTAIN), False, certain
        elif stuck:
            tolerance = min(LOOSENING * tolerance, LOOSEST)
    return best


def _find(problem: Problem, state: State, tolerance: float, again: bool) -> State:
    """Look for the columns that are not found yet, or `again` for all of them."""
    everyone = torch.arange(len(state.rows), device=state.rows.device)
    todo = everyone if again else everyone[~state.found(tolerance)]
    # Signals have the last word where their corrections leave nothing out, or where only refinement is left.
    decisive = problem.few_classes or bool(state.confirmed.all())
    refining = CONFIRMED if again and decisive else 0.0
    # Of many classes they leave something out: where enough units are silent, these know better.
    one_step = problem.responses_change is None
    silence = CERTAIN if again and one_step and not problem.few_classes else 0.0
    activations, margins = pre_activations(problem, state.rows[todo])
    scale = activations.std(1, keepdim=True).clamp(min=torch.finfo(activations.dtype).tiny)
    surety = (margins / scale).clamp(0, 1)
    basis, rest = problem.mixture.basis, todo.new_ones(len(todo)).nonzero().flatten()
    if silence or not refining or not one_step:
        # Cheap, and needs no signals; but samples that are much alike can blend where a unit is misjudged.
        beliefs = torch.where(activations < 0, surety, 0)
        found = silent_columns(basis, beliefs, state.columns[todo], unaided=not one_step)
        state = _replace(state, todo, found, silence or refining)
        rest = (found.residuals >= (silence or tolerance)).nonzero().flatten()
    if len(rest):
        behind = problem.behind
        entries = signed_columns(state)[todo[rest]] @ basis.T
        labels = candidate_labels(behind.network, behind.loss, activations[rest], entries)
        if again:
            # Where nothing came of the estimated column, it is no guide to the label either.
            others = fitting_labels(behind.network, behind.loss, activations[rest], problem.complement)
            labels = torch.where(state.found(tolerance)[todo[rest]], labels, others)
        signals, directions = correction_directions(behind.network, behind.loss, activations[rest], labels)
        weights = surety[rest].clamp(min=0.02)
        if not one_step:
            # Over several steps zeros stay zeros, while signals are averages that the middle only approximates.
            weights = torch.where(activations[rest] < 0, weights, DRIFTING * weights)
        fitted = signal_columns(basis, problem.complement, weights, signals, directions)
        if not one_step:
            fitted = fitted._replace(residuals=fitted.residuals.clamp(min=CONFIRMED))  # an average confirms nothing
        state = _replace(state, todo[rest], fitted, refining)
    return state


def _replace(state: State, which: Tensor, found: Columns, tolerance: float) -> State:
    """Take over the columns that fit better than those before, or fit as well and come from better estimates."""
    better = (found.residuals < state.residuals[which]) | (found.residuals < tolerance)
    columns, residuals = state.columns.clone(), state.residuals.clone()
    columns[which[better]] = found.columns[better]
    residuals[which[better]] = found.residuals[better]
    return state._replace(columns=columns, residuals=residuals)


def _without_repeats(state: State) -> State:
    """Where two estimates ended at one column, only the better one keeps it."""
    order = state.residuals.argsort()
    ordered = state.columns[order]
    same = (ordered @ ordered.T).abs() > SAME
    found = state.residuals[order].isfinite()
    repeated = torch.zeros_like(found)
    repeated[order] = (same.tril(-1) & found.unsqueeze(0)).any(1) & found
    return state._replace(residuals=torch.where(repeated, torch.inf, state.residuals))


def _certain_only(state: State) -> State:
    """The state with every column forgotten that fits nearly."""
    return state._replace(residuals=torch.where(state.found(CERTAIN), state.residuals, torch.inf))


def _resolve_others(problem: Problem, state: State, tolerance: float) -> State:
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
    columns[~known] = unit_rows(least_squares(unmixed @ unmixed.T, unmixed @ signals.T))
    rows = torch.linalg.pinv(columns.T)
    if problem.responses_change is not None and int(known.sum()) > MOST * len(known):
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
            amounts[number] = least_squares(
                weighted @ rest.flatten(1).T, (weighted @ source.flatten()).unsqueeze(1)
            ).squeeze(1)
        left = sources - (amounts @ rest.flatten(1)).view_as(sources)
    return rows - amounts @ others


def _is_better(problem: Problem, new: Assessment, old: Assessment, separated: Assessment) -> bool:
    """By how well the gradient is explained; where that says little, by what the silent units confirm.

    Without such confirmation it must be explained clearly better than by what was separated, whatever the inputs' sizes
    are taken to be: noise can be explained a little by sizes alone, and by columns that fit nothing but noise. Where
    much is left unexplained, only sizes at which all inputs count the same speak for an answer: fitted ones explain
    noise as well.
    """
    misfits = misfit_of(problem, new), misfit_of(problem, old)
    if problem.responses_change is not None:  # the gradient of no single step is known
        confirmed = [int(one.state.confirmed.sum()) for one in (new, old)]
    elif min(misfits) > UNEXPLAINED and not _drowned(problem):  # the network behind is not the trained one (dropout)
        confirmed = [float(one.state.found(CERTAIN).double().mean()) > NEARLY_ALL for one in (new, old)]
    else:
        confirmed = [0, 0]
    clearly = new.residual < CLEARLY * separated.residual
    credible = new.residual < UNEXPLAINED or new.even_residual < HALF
    if problem.responses_change is None and not confirmed[0] and not (clearly and credible):
        return False
    return (-confirmed[0], misfits[0]) < (-confirmed[1], misfits[1])


def _drowned(problem: Problem) -> bool:
    """Whether noise is nearly as strong as the weakest sample: then the space of the columns itself is uncertain."""
    return problem.mixture.overlap > MOST_OVERLAP


def _confirmed(problem: Problem, best: Assessment) -> Tensor:
    """Which inputs are confirmed (n,): redundant units agree on the column and, after one step, so does the signal."""
    if _drowned(problem):
        return torch.zeros_like(best.state.confirmed)
    if problem.responses_change is not None:
        return best.state.found(CERTAIN)
    entries = unit_rows(signed_columns(best.state) @ problem.mixture.basis.T)
    apart: Tensor = (entries - unit_rows(best.signals)).norm(dim=1)
    return best.state.confirmed & (apart < CONFIRMED)


def _verdict(
    problem: Problem, best: Assessment, confirmed: Tensor, components: int | None, explained: float
) -> ExactStatus:
    if best.whole_residual < min(explained, PROVEN * best.weakest):
        complete = components is None or int(best.times.sum()) == components
        return ExactStatus.EXACT if complete else ExactStatus.MISCOUNTED
    if best.residual < min(explained, PROVEN * best.weakest):
        return ExactStatus.UNEVEN
    if bool(best.state.found(CERTAIN).all()) and problem.responses_change is not None:
        return ExactStatus.CONFIRMED
    if bool(confirmed.any()):
        return ExactStatus.INEXACT if bool(confirmed.all()) else ExactStatus.PARTIAL
    return ExactStatus.NOISE_FLOOR if _drowned(problem) else ExactStatus.UNCONFIRMED
