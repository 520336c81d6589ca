"""Which hypercube gives the most: along the directions, and at the lengths, that the update tells least about.

The vertices' covariance never exceeds the prior's, so that no vertex is less plausible than a draw from it. The
directions are the principal axes of the linearised posterior, with derivatives replaced by differences over steps of
the prior's own length. Every choice is made on pairs of its own; a last set of pairs then certifies the one chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.bounds.cube import Bound, Cube, Doubt, Signal, certify, estimate

SECANT = 0.1
"""Length, in standard deviations of the prior, of the differences that stand for derivatives."""
TINY_SECANT = 1e-3
"""The same for networks without kinks, where the derivative itself is wanted."""
SCALES = (1.0, 0.5, 0.25, 0.1)
"""Parts of the standard deviations that are tried as half steps: longer ones are less plausible than the prior."""
EXACT_SCALES = (1.0, 0.1, 0.01)
"""The same where there is no noise, and only equal updates count."""
ENTRIES = 2**18
"""Entries of the update, drawn at random, that directions are chosen by: a bound on memory."""
NEARLY_BLIND = 0.9
"""Part of the blind error from which a cube of the prior's own size needs no better directions: half a decibel."""


class Prior(NamedTuple):
    """Orthonormal `directions` (r, d) and the `variances` (r,) of samples along them."""

    directions: Tensor
    variances: Tensor


class Effort(NamedTuple):
    """Pairs for each cube that is tried, pairs for the one chosen, and whether directions are adapted."""

    tried: int
    certified: int
    adapts: bool


def tightest(
    center: Tensor,
    prior: Prior,
    signal: Signal,
    doubt: Doubt,
    *,
    noisy: bool,
    effort: Effort,
    confidence: float,
    rng: torch.Generator,
) -> Bound:
    """The highest lower bound of the mean squared error that is reached on cubes around `center`."""
    seed = int(torch.randint(2**62, (), generator=rng))
    chosen, most = None, 0.0
    for cube in _candidates(center, prior, signal, noisy=noisy, adapts=effort.adapts, rng=rng):
        # The same draws for every cube: their differences vary less than their values.
        error = estimate(cube, signal, doubt, effort.tried, torch.Generator().manual_seed(seed))
        if chosen is None or error > most:
            chosen, most = cube, error
        if error >= NEARLY_BLIND * float(prior.variances.sum()) / center.numel():
            break
    assert chosen is not None
    if most == 0.0 and not noisy:
        return Bound(0.0, chosen, effort.tried * len(EXACT_SCALES), None)
    return certify(chosen, signal, doubt, pairs=effort.certified, confidence=confidence, rng=rng)


def prior_cube(center: Tensor, prior: Prior, scale: float = 1.0) -> Cube:
    """The cube whose vertices have the prior's variances, times scale²."""
    return Cube(center, prior.directions, 2 * scale * prior.variances.sqrt())


def posterior(prior: Prior, information: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (r,) and axes (r, d) of what is left open: (C⁻¹ + information)⁻¹ along the prior's directions."""
    # Scaled by the prior, because variances differ by many orders of magnitude.
    root = prior.variances.double().sqrt()
    told = torch.eye(len(root), dtype=torch.float64) + root[:, None] * information.double() * root
    covariance = root[:, None] * torch.linalg.inv(told) * root
    variances, axes = torch.linalg.eigh((covariance + covariance.T) / 2)
    return variances.clamp(min=0).to(prior.variances), axes.T.to(prior.directions) @ prior.directions


def information_about(center: Tensor, prior: Prior, signal: Signal, length: float, rng: torch.Generator) -> Tensor:
    """JᵀJ (r, r) along the prior's directions, by differences of `length` standard deviations, inside [0, 1]."""
    start = signal(center)
    entries = torch.randint(start.numel(), (ENTRIES,), generator=rng) if start.numel() > ENTRIES else None
    rows = []
    for direction, variance in zip(prior.directions, prior.variances, strict=True):
        step = length * float(variance.sqrt()) * direction
        moved = max(((center + step).clamp(0, 1), (center - step).clamp(0, 1)), key=lambda x: _along(x - center, step))
        along = float((moved - center) @ direction)
        slope = (signal(moved) - start) / along if along else torch.zeros_like(start)
        rows.append(slope if entries is None else slope[entries] * (start.numel() / ENTRIES) ** 0.5)
    slopes = torch.stack(rows).double()
    return slopes @ slopes.T


def linearised_error(center: Tensor, prior: Prior, signal: Signal, rng: torch.Generator) -> float:
    """Error per value of the best linear estimate, if the update were linear in the sample and its noise Gaussian."""
    variances, _ = posterior(prior, information_about(center, prior, signal, TINY_SECANT, rng))
    return float(variances.sum() / center.numel())


def _candidates(
    center: Tensor, prior: Prior, signal: Signal, *, noisy: bool, adapts: bool, rng: torch.Generator
) -> Iterator[Cube]:
    for scale in SCALES[:1] if noisy and adapts else SCALES if noisy else EXACT_SCALES:
        yield prior_cube(center, prior, scale)
    if noisy and adapts:
        left_open, axes = posterior(prior, information_about(center, prior, signal, SECANT, rng))
        for scale in SCALES:
            yield prior_cube(center, Prior(axes, left_open), scale)
        yield prior_cube(center, prior, SCALES[2])


def _along(moved: Tensor, step: Tensor) -> float:
    return abs(float(moved @ step))
