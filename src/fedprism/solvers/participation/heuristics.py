"""Heuristics that look for all users' columns at once: zeros and ones that keep the counts and lie in the sums' space.

The space is the same for all users, only the counts differ. Each returns columns (users, rounds), right or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.evidence import Evidence
from fedprism.solvers.participation.marginals import marginals
from fedprism.solvers.participation.subspace import SignalSpace

PASSING_ITERATIONS = 40
"""Iterations of message passing after which columns that are not right are given up."""
PASSING_CHECK = 5
"""Iterations of message passing between two checks of all columns."""
DAMPING = 0.7
"""Weight of a new estimate against the one before, in message passing."""
MOST_GAIN = 0.9
"""Bound on the divergence of the estimate from the counts, which is divided by what is left to 1."""
TIE_BREAK = 1e-3
"""Weight of the readings beside probabilities, so that they decide among equal ones only."""
MAP_ITERATIONS = 8000
"""Iterations of the difference map after which it is given up."""
MAP_CHECK = 10
"""Iterations of the difference map between two checks of all columns."""
HOPS = 60
"""How often hopping shakes the best columns."""
HOP_ITERATIONS = 30
"""Iterations of the difference map between two shakes."""
HOP_SPREAD = 0.4
"""Standard deviation of a shake, where entries are 0 and 1."""
MOST_SILENT = 1024
"""Silent rounds that a column may be in all the same, if its counts say so; in others it is not looked for."""
REDUNDANT = 1e-6
"""Singular value, relative to the largest, up to which an equation repeats others."""


def message_passing(evidence: Evidence, known: Analytics) -> Tensor:
    """Vector approximate message passing between the space of the sums and the counts in every window.

    After Rangan, Schniter and Fletcher, "Vector approximate message passing", 2019, with two twists. The column itself
    lies in the space, so that only the part of the estimate that is not along the column is sensed: `along` keeps
    track of the rest. And the fraction of ones is known from the counts.
    """
    space = evidence.space
    basis, live = space.basis.float(), (~space.silent).float()
    rounds, equations = len(basis), space.equations
    columns = torch.zeros(len(known.fixed), rounds, dtype=torch.bool, device=basis.device)
    waiting = torch.arange(len(columns), device=basis.device)
    estimate = _expected_entries(known)
    rate = estimate.mean(1, keepdim=True).clamp(min=1e-9)
    along = estimate.square().mean(1, keepdim=True)
    for iteration in range(PASSING_ITERATIONS):
        scale = (along / rate).clamp(min=1e-6)
        outside = live * estimate - (estimate @ basis) @ basis.T
        reading = (estimate - rounds / equations * outside) / scale
        energy = outside.square().sum(1, keepdim=True) / equations
        variance = (energy * (rounds - equations) / equations / scale.square()).clamp(min=1e-8)
        chance = marginals(reading, variance, known)
        if _is_due(iteration, PASSING_CHECK, PASSING_ITERATIONS):
            columns[waiting] = known.nearest_columns(chance + TIE_BREAK * reading.clamp(-10, 10))
            wrong = ~evidence.accepts(columns[waiting], known)
            if not bool(wrong.any()):
                break
            waiting, known = waiting[wrong], known.of(wrong)
            estimate, rate, along = estimate[wrong], rate[wrong], along[wrong]
            reading, variance, chance = reading[wrong], variance[wrong], chance[wrong]
        gain = ((chance * (1 - chance)).mean(1, keepdim=True) / variance).clamp(max=MOST_GAIN)
        aim = (chance - gain * reading) / (1 - gain)
        aim_along = (chance.square().mean(1, keepdim=True) - gain * rate) / (1 - gain)
        estimate = DAMPING * aim + (1 - DAMPING) * estimate
        along = DAMPING * aim_along + (1 - DAMPING) * along
    return columns


def difference_map(
    evidence: Evidence, known: Analytics, *, start: Tensor, iterations: int = MAP_ITERATIONS, step: float = 0.4
) -> Tensor:
    """Relaxed reflections between the affine space of sums and counts, and the zeros and ones that keep the counts.

    After Elser, "The complexity of bit retrieval", 2018. It wanders, and stops only where both meet. Under noise they
    do not quite: then it is the best column on the way that counts.
    """
    meeting = Meeting(evidence.space, known)
    offset = meeting.offset
    point = start.float()
    columns = known.nearest_columns(point)
    lowest = evidence.residual(columns)
    waiting = torch.arange(len(columns), device=start.device)
    for iteration in range(iterations):
        affine = meeting.nearest(point, offset)
        rounded = known.nearest_columns(2 * affine - point)
        point = point + step * (rounded.float() - affine)
        if _is_due(iteration, MAP_CHECK, iterations):
            residual = evidence.residual(rounded)
            better = residual < lowest[waiting]
            columns[waiting[better]], lowest[waiting[better]] = rounded[better], residual[better]
            wrong = ~evidence.accepts(rounded, known)
            if not bool(wrong.any()):
                break
            waiting, known, point, offset = waiting[wrong], known.of(wrong), point[wrong], offset[wrong]
    return columns


def hopping(evidence: Evidence, known: Analytics, *, start: Tensor) -> Tensor:
    """For noise: shake the best column so far, wander shortly, exchange rounds as long as it helps, keep the better."""
    rng = torch.Generator().manual_seed(0)
    columns = start.clone()
    for _ in range(HOPS):
        shaken = columns.float() + HOP_SPREAD * torch.randn(columns.shape, generator=rng).to(columns.device)
        candidates = difference_map(evidence, known, start=shaken, iterations=HOP_ITERATIONS)
        candidates = evidence.polished(candidates, known)
        better = evidence.residual(candidates) < evidence.residual(columns)
        columns = torch.where(better[:, None], candidates, columns)
    return columns


def _is_due(iteration: int, interval: int, iterations: int) -> bool:
    """Whether the columns are checked after this iteration: at regular intervals, and after the last."""
    return (iteration + 1) % interval == 0 or iteration == iterations - 1


def _expected_entries(known: Analytics) -> Tensor:
    """Every entry's probability from the counts alone, (users, rounds)."""
    length = (known.tiles < known.rounds).sum(1)
    middle = known.rate[:, None] * length
    expected = torch.minimum(torch.maximum(middle, known.tile_least), known.tile_most.double()) / length
    chances = known.untiled(expected[..., None].expand(-1, -1, known.tiles.shape[1]))
    return torch.where(known.fixed >= 0, known.fixed.double(), chances).float()


class Meeting:
    """Where the space of the sums meets the exact counts: per user an affine space, parallel to all others."""

    def __init__(self, space: SignalSpace, known: Analytics) -> None:
        basis = space.basis
        silent = space.silent.nonzero()[:, 0][:MOST_SILENT]
        units = basis.new_zeros(len(basis), len(silent))
        units[silent, torch.arange(len(silent), device=silent.device)] = 1  # the sums say nothing of silent rounds
        basis = torch.cat([basis, units], 1)
        certain = (known.tile_least == known.tile_most).all(0)
        tiles = torch.nn.functional.pad(basis, (0, 0, 0, 1))[known.tiles[certain]].sum(1)  # (tiles, rank)
        wanted = known.tile_least[:, certain].double()
        left, weights, right = torch.linalg.svd(tiles, full_matrices=False)
        kept = weights > REDUNDANT * weights[:1]
        # Counts and sums may say the same thing twice: directions of no weight are left out.
        self._basis, self._directions = basis.float(), right[kept].T.float()
        self.offset = (wanted @ left[:, kept] / weights[kept]).float()
        """(users, directions): what the counts say of the part of the space that they see."""

    def nearest(self, points: Tensor, offset: Tensor) -> Tensor:
        """The nearest points (users, rounds) that lie in the space and keep the exact counts."""
        inside = points @ self._basis
        inside = inside - (inside @ self._directions - offset) @ self._directions.T
        nearest: Tensor = inside @ self._basis.T
        return nearest
