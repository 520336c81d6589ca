"""Which hypercube gives the most: along the directions, and at the lengths, that the update tells least about.

The vertices' covariance never exceeds the prior's, so that no vertex is less plausible than a draw from it. Steps along
all directions of the prior are cut to one length, as water would fill them: what noise hides most are the many
directions along which samples vary little. Where samples are small, the axes of the linearised posterior are tried as
well. Every choice is made on pairs of its own; a last set of pairs then certifies the cube that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.bounds.cube import Basis, Bound, Cube, Doubt, Signal, certify, promise

LEVELS = (math.inf, 0.25, 0.06, 0.015, 4e-3, 1e-3, 2.5e-4, 6e-5)
"""Half steps, in the unit of the values, that the prior's standard deviations are cut to: 12 to about 85 dB."""
FINER = (2.0, 0.5)
"""Factors by which the best of these levels is then changed."""
WIDEST = 1.0
"""What they change if the prior's own deviations, not cut, are best: the range of the values."""
SCALES = (1.0, 0.5)
"""Parts of the posterior's standard deviations that are tried as half steps."""
SECANT = 0.1
"""Length, in standard deviations of the prior, of the differences that stand for derivatives across kinks."""
TINY_SECANT = 1e-3
"""The same where there are no kinks and the derivative itself is wanted."""
MOST_ADAPTED = 64
"""Values of a sample up to which directions are adapted: each costs an update."""
FINALISTS = 2
"""Cubes that are tried again before one is certified."""
SECOND_LOOK = 2
"""On how many times as many pairs they are tried then."""
NEARLY_BLIND = 0.9
"""Part of the prior's variance from which a cube needs no improvement: half a decibel."""


class Prior(NamedTuple):
    """How much samples vary: `variances` (d,) along the directions of `basis`."""

    basis: Basis
    variances: Tensor


class Effort(NamedTuple):
    """Pairs for each cube that is tried, pairs for the one chosen, and whether directions may be adapted."""

    tried: int
    certified: int
    adapts: bool


def tightest(
    center: Tensor,
    prior: Prior,
    signal: Signal,
    doubt: Doubt,
    *,
    effort: Effort,
    confidence: float,
    rng: torch.Generator,
) -> Bound:
    """The highest lower bound of the mean squared error that is reached on cubes around `center`."""
    seed, scored = int(torch.randint(2**62, (), generator=rng)), list[tuple[float, Cube]]()

    def score(cube: Cube, rounds: int = 1) -> float:
        # The same draws for every cube: their differences vary less than their values.
        draws = torch.Generator().manual_seed(seed + rounds)
        return promise(cube, signal, doubt, rounds * effort.tried, draws)

    most, level = 0.0, math.inf
    for next_level in LEVELS:
        cube = prior_cube(center, prior, next_level)
        if cube.blind_error <= most:
            break  # shorter steps cannot give more
        scored.append((score(cube), cube))
        most, level = max((most, level), (scored[-1][0], next_level), key=lambda entry: entry[0])
        if most >= NEARLY_BLIND * float(prior.variances.mean()):
            break
    if most == 0:
        return Bound(0.0, scored[0][1], effort.tried * len(scored), None)
    refined = _refined(center, prior, signal, min(level, WIDEST), adapts=effort.adapts)
    scored += [(score(cube), cube) for cube in refined if cube.blind_error > most]
    finalists = sorted(scored, key=lambda entry: entry[0], reverse=True)[:FINALISTS]
    # A few pairs can mislead: those that look best are looked at again.
    chosen = max((cube for _, cube in finalists), key=lambda cube: score(cube, SECOND_LOOK))
    return certify(chosen, signal, doubt, pairs=effort.certified, confidence=confidence, rng=rng)


def prior_cube(center: Tensor, prior: Prior, level: float = math.inf) -> Cube:
    """The cube with the prior's standard deviations, cut to `level`, as half steps."""
    return Cube(center, prior.basis, 2 * prior.variances.sqrt().clamp(max=level))


def posterior(prior: Prior, information: Tensor) -> Prior:
    """What is left open: (C⁻¹ + information)⁻¹, in its own axes. `information` (d, d) is along the prior's."""
    # Scaled by the prior, because variances differ by many orders of magnitude.
    root = prior.variances.double().sqrt()
    told = torch.eye(len(root), dtype=torch.float64) + root[:, None] * information.double() * root
    covariance = root[:, None] * torch.linalg.inv(told) * root
    variances, axes = torch.linalg.eigh((covariance + covariance.T) / 2)
    rows = torch.stack([prior.basis.combine(axis) for axis in axes.T.to(prior.variances)])
    return Prior(Basis((rows,)), variances.clamp(min=0).to(prior.variances))


def information_about(center: Tensor, prior: Prior, signal: Signal, length: float) -> Tensor:
    """JᵀJ (d, d) along the prior's directions, by differences of `length` standard deviations, inside [0, 1]."""
    start, rows = signal(center), []
    for number, deviation in enumerate(prior.variances.sqrt().tolist()):
        direction = prior.basis.direction(number)
        sides = [(center + sign * length * deviation * direction).clamp(0, 1) - center for sign in (1, -1)]
        moved = max(sides, key=lambda side: abs(float(side @ direction)))
        along = float(moved @ direction)
        rows.append((signal(center + moved) - start) / along if along else torch.zeros_like(start))
    slopes = torch.stack(rows).double()
    return slopes @ slopes.T


def linearised_error(center: Tensor, prior: Prior, signal: Signal) -> float:
    """Error per value of the best linear estimate, if the update were linear in the sample and its noise Gaussian."""
    return float(posterior(prior, information_about(center, prior, signal, TINY_SECANT)).variances.mean())


def _refined(center: Tensor, prior: Prior, signal: Signal, level: float, *, adapts: bool) -> Iterator[Cube]:
    """Levels beside the best, and the linearised posterior's axes."""
    for factor in FINER:
        if factor * level < float(prior.variances.max().sqrt()):
            yield prior_cube(center, prior, factor * level)
    if adapts and center.numel() <= MOST_ADAPTED:
        left_open = posterior(prior, information_about(center, prior, signal, SECANT))
        for scale in SCALES:
            yield prior_cube(center, left_open._replace(variances=scale**2 * left_open.variances))
