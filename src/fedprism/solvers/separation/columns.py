"""One sample's column of the mixing, found by what is known about its entries; wrong beliefs are outvoted.

A column of A lies in the span of L (h, n) and its entry at unit j is D_j v_j: zero where the unit is silent (D_j = 0),
the signal that the network sends back where it is not. Which units are silent is known from an estimate of the sample,
up to a few mistakes near the threshold. Least absolute deviations ignore mistakes that are sparse; they are computed by
iteratively reweighted least squares, for many samples at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

REWEIGHTINGS = 16
"""Steps of iteratively reweighted least squares."""
SURE_REWEIGHTINGS = 2
"""The same where only units are looked at that are hardly ever misjudged."""
SPARE_UNITS = 12
"""How many units beyond the unknowns must be left to tell a fit from a coincidence."""
SURE = 0.3
"""Units at least this far from their threshold, in standard deviations, are hardly ever misjudged."""
EXACT_FIT = 1e-3
"""Misfit, relative to the mean entry, below which a column from sure units needs no others."""
REACHED = 1e-6
"""Length of a unit's row of the basis, relative to the longest, below which no sample reaches the unit."""
SECOND_COLUMN = 1e-3
"""What another column must keep of its squared length at the units that fit."""
DECISIVE = 0.99
"""The leverage above which a single unit decides between a column and a blend."""
FITS = 0.01
"""Misfits smaller than this fraction of a column's mean entry are no mistakes."""
COARSE_MISFIT = 1e-3
"""Misfits below this count the same at first, so that the order of mistakes can still change."""
SMALLEST_MISFIT = 1e-4
"""Misfits below this count the same in the end."""
COARSE_STEPS = 5
"""Reweightings with coarse misfits."""
CORRECTION_COST = 0.25
"""What corrections t of unit size cost, in units of a misfit of one entry."""
DAMPINGS = (1e-13, 1e-9, 1e-5)
"""Fractions of the largest diagonal entry that are added to a system until it can be factored."""
MOST_NUMBERS = 2**26
"""Entries of the largest temporary: samples are treated in groups that fit."""


class Columns(NamedTuple):
    columns: Tensor
    """(samples, n) in the coordinates of L, of unit length"""
    residuals: Tensor
    """(samples,) the middle misfit among the redundant units, relative to the column's mean entry; inf: no redundancy.

    A fit with as many unknowns as units misfits nowhere: only units beyond the unknowns are evidence."""


def silent_columns(basis: Tensor, weights: Tensor, start: Tensor, *, unaided: bool = True) -> Columns:
    """Columns that vanish at the silent units: min sum_j w_j |L_j q|, q normalised along `start` (samples, n).

    weights (samples, h): how surely a unit is silent; 0 where it is not. unaided: nothing else will judge the columns,
    so that no single unit may decide what they are.
    """
    units, size = basis.shape
    answers, residuals = start.clone(), start.new_full((len(start),), torch.inf)
    lengths = basis.norm(dim=1)
    weights = torch.where(lengths > REACHED * lengths.max(), weights, 0)
    # Most often no unit far from its threshold is misjudged: then those alone give the column, and cheaply.
    sure = torch.where(weights > SURE, weights, 0)
    for trusted, reweightings, expected in ((sure, SURE_REWEIGHTINGS, EXACT_FIT), (weights, REWEIGHTINGS, torch.inf)):
        todo = (residuals.isinf() & ((trusted > 0).sum(1) >= size + SPARE_UNITS)).nonzero().flatten()
        for group in _groups(todo, units * size):
            columns, misfits = _silent(basis, trusted[group], start[group], reweightings)
            residual = _redundant_misfit(misfits, trusted[group] > 0, size)
            fitting = (trusted[group] > 0) & (misfits < FITS)
            fits = (residual < expected) & _is_only(basis, fitting, columns)
            if unaided:
                fits &= ~_hangs_on_one(basis, fitting, columns)
            answers[group[fits]], residuals[group[fits]] = columns[fits], residual[fits]
    return Columns(answers / answers.norm(dim=1, keepdim=True), residuals)


def _silent(basis: Tensor, weights: Tensor, start: Tensor, reweightings: int) -> tuple[Tensor, Tensor]:
    """Columns, by inverse iteration from `start`, and the size of their entries relative to the mean."""
    reweighted = weights
    for iteration in range(reweightings):
        columns = _solve(basis.T @ (reweighted.unsqueeze(2) * basis), start)
        columns = columns / columns.norm(dim=1, keepdim=True)
        entries = (columns @ basis.T).abs()
        floor = _smallest_misfit(iteration) * entries.mean(1, keepdim=True)
        reweighted = weights / torch.maximum(entries, floor)
    return columns, entries / entries.mean(1, keepdim=True)


def _is_only(basis: Tensor, fitting: Tensor, columns: Tensor) -> Tensor:
    """Whether no other column vanishes at the fitting units (samples, h), by their Gram matrix' second eigenvalue."""
    gram = basis.T @ (fitting.to(basis).unsqueeze(2) * basis)
    other = torch.randn(columns.shape, generator=torch.Generator().manual_seed(0), dtype=columns.dtype)
    vectors = torch.stack([columns, other.to(columns.device)], dim=2)
    for _ in range(3):
        vectors = torch.linalg.qr(_solve(gram, vectors)).Q
    ritz = torch.linalg.eigvalsh(vectors.transpose(1, 2) @ gram @ vectors)[:, -1]
    enough: Tensor = fitting.sum(1) >= basis.shape[1] + SPARE_UNITS
    return enough & (ritz > SECOND_COLUMN) if basis.shape[1] > 1 else enough


def _hangs_on_one(basis: Tensor, fitting: Tensor, columns: Tensor) -> Tensor:
    """Whether other columns would vanish at the fitting units (samples, h) as well if one of these were left out.

    So it is with a blend of two samples' columns that vanishes at one unit more than both do.
    """
    # The column itself is out of question here: it adds to no unit's leverage.
    gram = basis.T @ (fitting.to(basis).unsqueeze(2) * basis) + columns.unsqueeze(2) * columns.unsqueeze(1)
    leverages = (basis.T * _solve(gram, basis.T.expand(len(columns), -1, -1))).sum(1)
    alone: Tensor = torch.where(fitting, leverages, 0).amax(1) > DECISIVE
    return alone & (basis.shape[1] > 1)


def signal_columns(basis: Tensor, complement: Tensor, weights: Tensor, signals: Tensor, directions: Tensor) -> Columns:
    """Columns that equal a signal but for corrections t that cost a little: min sum_j w_j |L_j q - (v + B t)_j|.

    signals v (samples, h), directions B (samples, h, m). complement (h, h - n): the directions L does not span.
    """
    units, size = basis.shape
    free = size + directions.shape[2]
    answers, residuals = signals @ basis, signals.new_full((len(signals),), torch.inf)
    if units >= free + SPARE_UNITS:
        solve = _primal if free <= complement.shape[1] else _dual
        for group in _groups(torch.arange(len(signals), device=signals.device), units * min(free, units - size)):
            length = signals[group].norm(dim=1).clamp(min=torch.finfo(signals.dtype).tiny)
            scale = units**0.5 / length
            scaled = signals[group] * scale.unsqueeze(1), directions[group] * scale.view(-1, 1, 1)
            columns, misfits = solve(basis, complement, weights[group], *scaled)
            columns, misfits = _without_mistakes(basis, columns, misfits, *scaled)
            answers[group] = columns
            entries = (columns @ basis.T).abs().mean(1, keepdim=True)
            everywhere = torch.ones_like(misfits, dtype=torch.bool)
            residuals[group] = _redundant_misfit(misfits.abs() / entries, everywhere, free)
    lengths = answers.norm(dim=1, keepdim=True).clamp(min=torch.finfo(answers.dtype).tiny)
    return Columns(answers / lengths, residuals)


def _without_mistakes(
    basis: Tensor, columns: Tensor, misfits: Tensor, signals: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain least squares over the units that fit, where these are enough: the others have no pull left."""
    units, size = basis.shape
    fitting = misfits.abs() < FITS * (columns @ basis.T).abs().mean(1, keepdim=True)
    enough = fitting.sum(1) >= size + directions.shape[2] + SPARE_UNITS
    matrix = torch.cat([basis.expand(len(signals), units, size), -directions], dim=2)
    chosen = matrix * fitting.unsqueeze(2)
    solution = _solve(chosen.transpose(1, 2) @ matrix, (chosen * signals.unsqueeze(2)).sum(1))
    refined = (matrix @ solution.unsqueeze(2)).squeeze(2) - signals
    columns = torch.where(enough.unsqueeze(1), solution[:, :size], columns)
    return columns, torch.where(enough.unsqueeze(1), refined, misfits)


def _primal(
    basis: Tensor, complement: Tensor, weights: Tensor, signals: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Normal equations in (q, t): cheap while they are fewer than the dimensions outside the span."""
    units, size = basis.shape
    matrix = torch.cat([basis.expand(len(signals), units, size), -directions], dim=2)
    cost = torch.zeros(matrix.shape[2], dtype=basis.dtype, device=basis.device)
    cost[size:] = CORRECTION_COST
    reweighted = weights
    for iteration in range(REWEIGHTINGS):
        weighted = matrix * reweighted.unsqueeze(2)
        right = (weighted * signals.unsqueeze(2)).sum(1)
        solution = _solve(weighted.transpose(1, 2) @ matrix + torch.diag(cost), right)
        misfits = (matrix @ solution.unsqueeze(2)).squeeze(2) - signals
        reweighted = weights / misfits.abs().clamp(min=_smallest_misfit(iteration))
    return solution[:, :size], misfits


def _dual(
    basis: Tensor, complement: Tensor, weights: Tensor, signals: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from as many equations as there are dimensions outside the span of L, in which v + B t + f must lie."""
    outside = complement.T @ directions
    right = -(signals @ complement)
    cheap = outside @ outside.transpose(1, 2) / CORRECTION_COST
    inverse_weights = 1 / weights
    for iteration in range(REWEIGHTINGS):
        multipliers = _solve(complement.T @ (inverse_weights.unsqueeze(2) * complement) + cheap, right)
        misfits = inverse_weights * (multipliers @ complement.T)
        corrections = (outside.transpose(1, 2) @ multipliers.unsqueeze(2)).squeeze(2) / CORRECTION_COST
        inverse_weights = misfits.abs().clamp(min=_smallest_misfit(iteration)) / weights
    inside = signals + (directions @ corrections.unsqueeze(2)).squeeze(2) + misfits
    return inside @ basis, misfits


def _smallest_misfit(iteration: int) -> float:
    return COARSE_MISFIT if iteration < COARSE_STEPS else SMALLEST_MISFIT


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    """Solutions, shaped like `right`, of symmetric positive systems (samples, k, k), slightly damped."""
    largest = matrices.diagonal(dim1=1, dim2=2).amax(1).clamp(min=torch.finfo(matrices.dtype).tiny)
    identity = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
    for damping in DAMPINGS:
        factors, failed = torch.linalg.cholesky_ex(matrices + (damping * largest).view(-1, 1, 1) * identity)
        if not bool(failed.any()):
            break
    solved = torch.cholesky_solve(right if right.dim() == 3 else right.unsqueeze(2), factors)
    return solved.view_as(right).nan_to_num()


def _redundant_misfit(misfits: Tensor, counted: Tensor, unknowns: int) -> Tensor:
    """The median of the counted misfits (samples, h) after leaving out the `unknowns` smallest ones."""
    ordered = torch.where(counted, misfits, torch.inf).sort(dim=1).values
    middle = unknowns + (counted.sum(1) - unknowns) // 2
    return ordered.gather(1, middle.clamp(max=misfits.shape[1] - 1).unsqueeze(1)).squeeze(1)


def _groups(indices: Tensor, numbers_each: int) -> tuple[Tensor, ...]:
    if not len(indices):
        return ()
    return torch.split(indices, max(1, MOST_NUMBERS // max(1, numbers_each)))
