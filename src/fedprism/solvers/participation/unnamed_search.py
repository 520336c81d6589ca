"""Columns without counts: zeros and ones in the space of the sums, found as independent sources.

Rounds are samples and users are independent sources that are on or off, so the sums alone are a mixture that
independent component analysis takes apart. Hyvärinen, "Fast and robust fixed-point algorithms for independent component
analysis", 1999, with the posterior mean of a source of zeros and ones as the nonlinearity: it knows what it looks for,
where skewness and kurtosis vanish at one rate or another. Every column found is projected out, which leaves an easier
problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedprism.runtime.progress import Listener
from fedprism.solvers.participation.evidence import Evidence
from fedprism.solvers.participation.unnamed_rules import Unnamed, confirmed, settled

STARTS = 512
"""Directions that are followed at a time."""
ITERATIONS = 100
"""Fixed-point iterations of a start: a hundred find ten times as much as forty where participation is .4 or .5."""
CHECK = 10
"""Iterations between two looks at what the directions have become."""
PATIENCE = 24
"""Batches of starts in a row without a new column after which the search ends."""
SHORT_PATIENCE = 4
"""The same where the rank is one of several guesses, or where counts find what is left over."""
EFFORT = 4e12
"""Multiplications without a new column after which the search ends earlier: a minute or two on two cores."""
RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Participation that starts assume while no column is known."""
OVERLAPS = (0.3, 0.5, 0.7, 0.8, 0.9)
"""How much of a source the posterior takes the direction to hold: which is best hangs on rounds per user and rate."""
OWN_RATES = 0.75
"""Part of the starts that assume the rate of a column found before."""
LEAST_NOISE = 0.02
"""Added to the variance of what is not the source, which would be zero at an overlap of one."""
ROUND_TRIPS = 5
"""Projections and roundings that a direction gets before it is checked."""
SAME = 1e-6
"""Singular value, relative to the largest, up to which a direction is a combination of others."""
HALVINGS = 8
"""Steps towards the threshold between two clusters of values."""


def search_unnamed(
    evidence: Evidence,
    known: Tensor,
    candidates: Tensor,
    *,
    more: Callable[[], Tensor] | None = None,
    patience: int = PATIENCE,
    seed: int = 0,
    progress: Listener,
    into: list[Unnamed],
) -> None:
    """Columns (any, rounds) of users: those that are `known`, the `candidates` as far as they hold, and what is found.

    `into` receives one answer, which is replaced whenever there is more: an interrupt loses nothing. `more` makes
    further candidates when the search ends early, so that these only ever add to what is found without them.
    """
    rng = torch.Generator().manual_seed(seed)
    space = evidence.space
    live = ~space.silent
    candidates = torch.cat([candidates, live[None]])  # whoever is always there has no variance to be found by
    into[:] = [settled(evidence, torch.cat([known, confirmed(evidence, candidates)]), known)]
    whole = _whitened(space.basis[live])
    cost = 4.0 * STARTS * ITERATIONS * whole.numel()
    patience = max(3, min(patience, math.ceil(EFFORT / max(1.0, cost))))
    stalled = 0
    while stalled < patience and len(into[0].columns) < space.rank:
        before = len(into[0].columns)
        directions = _without(whole, into[0].columns[:, live])
        if not directions.shape[1]:
            break
        starts = _starts(directions, stalled % 3, rng)
        rates, overlaps = _assumed(into[0].columns, int(live.sum()), rng)
        for values in _followed(directions, starts, rates.to(directions), overlaps.to(directions)):
            candidates = _rounded(evidence, values, live)
            accepted = confirmed(evidence, candidates)
            if len(accepted):
                into[:] = [settled(evidence, torch.cat([into[0].columns, accepted]), known)]
            if len(into[0].columns) >= space.rank:
                break
        stalled = 0 if len(into[0].columns) > before else stalled + 1
        if stalled == patience and more is not None:
            together = settled(evidence, torch.cat([into[0].columns, confirmed(evidence, more())]), known)
            more = None
            if len(together.columns) > len(into[0].columns):
                into[:], stalled = [together], 0
        progress(len(into[0].columns), space.rank)


def _whitened(basis: Tensor) -> Tensor:
    """(live rounds, at most rank) single precision: orthonormal, and each of mean zero."""
    left, values, _ = torch.linalg.svd(basis - basis.mean(0), full_matrices=False)
    directions: Tensor = left[:, values > SAME]
    return directions.float()


def _without(directions: Tensor, columns: Tensor) -> Tensor:
    """(live rounds, any): what is orthogonal to the columns (any, live rounds), all of mean zero."""
    if not len(columns):
        return directions
    centred = columns.to(directions) - columns.to(directions).mean(1, keepdim=True)
    inside = (centred @ directions).double()
    _, values, right = torch.linalg.svd(inside, full_matrices=True)
    rank = int((values > SAME * values[:1]).sum())
    rest: Tensor = directions.double() @ right[rank:].T
    return rest.float()


def _starts(directions: Tensor, order: int, rng: torch.Generator) -> Tensor:
    """(starts, any): random directions, or such as a few rounds have in common: the users who were in all of them."""
    rounds, width = directions.shape
    if not order:
        return torch.randn(STARTS, width, generator=rng).to(directions)
    values = torch.ones(STARTS, rounds).to(directions)
    for _ in range(order):
        values = values * (directions[torch.randint(rounds, (STARTS,), generator=rng).to(values.device)] @ directions.T)
    return values @ directions


def _assumed(columns: Tensor, rounds: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """(starts,) twice: the rate and the overlap that each start assumes."""
    rates = torch.tensor(RATES)[torch.randint(len(RATES), (STARTS,), generator=rng)]
    if len(columns):
        own = columns.sum(1).float().cpu() / rounds
        count = int(OWN_RATES * STARTS)
        rates[:count] = own[torch.randint(len(own), (count,), generator=rng)].clamp(1 / rounds, 1 - 1 / rounds)
    return rates, torch.tensor(OVERLAPS)[torch.randint(len(OVERLAPS), (STARTS,), generator=rng)]


def _followed(directions: Tensor, starts: Tensor, rates: Tensor, overlaps: Tensor) -> Iterator[Tensor]:
    """Values (starts, live rounds) of mean zero and variance one, every few iterations."""
    rounds = len(directions)
    rates, overlaps = rates[:, None], overlaps[:, None]
    off, on = -(rates / (1 - rates)).sqrt(), ((1 - rates) / rates).sqrt()
    slope = overlaps * (on - off) / (1 - overlaps.square() + LEAST_NOISE)
    level = (rates / (1 - rates)).log() - slope * overlaps * (on + off) / 2
    scale = math.sqrt(rounds)
    starts = starts / starts.norm(dim=1, keepdim=True)
    for iteration in range(1, ITERATIONS + 1):
        values = scale * starts @ directions.T
        chance = torch.sigmoid(level + slope * values)
        gain = slope * (chance * (1 - chance)).mean(1, keepdim=True)
        starts = chance @ directions / scale - gain * starts
        starts = starts / starts.norm(dim=1, keepdim=True).clamp(min=1e-12)
        if iteration % CHECK == 0:
            yield scale * starts @ directions.T


def _rounded(evidence: Evidence, values: Tensor, live: Tensor) -> Tensor:
    """The nearest columns (any, rounds) that can be had of values (starts, live rounds), each once."""
    basis = evidence.space.basis[live].float()
    everything = basis @ basis.sum(0)  # the projection of a column of ones
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    threshold = (low + high) / 2
    for _ in range(HALVINGS):
        upper = values > threshold
        ones = upper.sum(1, keepdim=True)
        above = (values * upper).sum(1, keepdim=True) / ones.clamp(min=1)
        below = (values * ~upper).sum(1, keepdim=True) / (values.shape[1] - ones).clamp(min=1)
        threshold = (above + below) / 2
    columns = values > threshold
    for _ in range(ROUND_TRIPS):
        projected = (columns.float() @ basis) @ basis.T
        # The sign of a direction is not known: the complement is looked at, too.
        missed, turned = (
            (columns.float() - projected).square().sum(1),
            ((~columns).float() - (everything - projected)).square().sum(1),
        )
        columns = torch.where((missed <= turned)[:, None], projected, everything - projected) > 0.5
    full = torch.zeros(len(columns), len(live), dtype=torch.bool, device=columns.device)
    full[:, live] = columns
    if not evidence.space.quiet:
        full = evidence.corrected(torch.unique(full, dim=0))
    each: Tensor = torch.unique(full, dim=0)
    return each[each.any(1)]
