"""Finding columns: zeros and ones that keep the counts and have no part outside the space of the sums.

All users are searched for at once: the space is the same for all of them, only the counts differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .analytics import Analytics
from .evidence import Evidence
from .subspace import SignalSpace
from .windows import marginals


class Found(NamedTuple):
    columns: Tensor
    """(users, rounds): the accepted columns, else the last candidates."""
    accepted: Tensor
    """(users,)"""


def message_passing(evidence: Evidence, known: Analytics, *, iterations: int = 40, damping: float = 0.7) -> Found:
    """Vector approximate message passing between the space of the sums and the counts in every window.

    After Rangan, Schniter and Fletcher, "Vector approximate message passing", 2019, with two twists. The column itself
    lies in the space, so that only the part of the estimate that is not along the column is sensed: `along` keeps
    track of the rest. And the share of ones is known from the counts.
    """
    basis = torch.linalg.qr(evidence.space.sensing)[0].float()
    rounds, equations = basis.shape
    columns = torch.zeros(len(known.fixed), rounds, dtype=torch.bool, device=basis.device)
    accepted = torch.zeros(len(columns), dtype=torch.bool, device=basis.device)
    waiting = torch.arange(len(columns), device=basis.device)
    here = known
    estimate = _share(here)
    share = estimate.mean(1, keepdim=True).clamp(min=1e-9)
    along = estimate.square().mean(1, keepdim=True)
    for iteration in range(iterations):
        scale = (along / share).clamp(min=1e-6)
        outside = (estimate @ basis) @ basis.T
        reading = (estimate - rounds / equations * outside) / scale
        energy = outside.square().sum(1, keepdim=True) / equations
        variance = (energy * (rounds - equations) / equations / scale.square()).clamp(min=1e-8)
        chance = marginals(reading, variance, here)
        if iteration % 5 == 4 or iteration == iterations - 1:
            candidates = here.nearest_columns(chance + 1e-3 * reading.clamp(-10, 10))
            right = evidence.accepts(candidates, here)
            columns[waiting], accepted[waiting] = candidates, right
            rest = ~right
            if not bool(rest.any()):
                break
            waiting, here = waiting[rest], here.of(rest)
            estimate, share, along = estimate[rest], share[rest], along[rest]
            reading, variance, chance = reading[rest], variance[rest], chance[rest]
        gain = ((chance * (1 - chance)).mean(1, keepdim=True) / variance).clamp(max=0.9)
        aim = (chance - gain * reading) / (1 - gain)
        aim_along = (chance.square().mean(1, keepdim=True) - gain * share) / (1 - gain)
        estimate = damping * aim + (1 - damping) * estimate
        along = damping * aim_along + (1 - damping) * along
    return Found(columns, accepted)


def difference_map(
    evidence: Evidence, known: Analytics, *, start: Tensor, iterations: int = 8000, step: float = 0.4
) -> Found:
    """Relaxed reflections between the affine space of sums and counts, and the zeros and ones that keep the counts.

    After Elser, "The complexity of bit retrieval", 2018. It wanders, and stops only where both meet. Under noise they
    do not quite: then it is the best column on the way that counts.
    """
    equations, values = _linear(evidence.space, known)
    columns = known.nearest_columns(start.float())
    lowest = evidence.residual(columns)
    accepted = torch.zeros(len(columns), dtype=torch.bool, device=start.device)
    waiting, here, point = torch.arange(len(columns), device=start.device), known, start.float()
    for iteration in range(iterations):
        affine = point - (point @ equations - values) @ equations.T
        rounded = here.nearest_columns(2 * affine - point)
        point = point + step * (rounded.float() - affine)
        if iteration % 10 == 9 or iteration == iterations - 1:
            residual = evidence.residual(rounded)
            better = residual < lowest[waiting]
            columns[waiting[better]], lowest[waiting[better]] = rounded[better], residual[better]
            accepted[waiting] = evidence.accepts(rounded, here)
            rest = ~accepted[waiting]
            if not bool(rest.any()):
                break
            waiting, here, point, values = waiting[rest], here.of(rest), point[rest], values[rest]
    return Found(columns, accepted)


def hopping(
    evidence: Evidence, known: Analytics, *, start: Tensor, hops: int = 60, iterations: int = 30, reach: float = 0.4
) -> Found:
    """For noise: shake the best column so far, wander shortly, exchange rounds as long as it helps, keep the better."""
    rng = torch.Generator().manual_seed(0)
    columns = start.clone()
    for _ in range(hops):
        shaken = columns.float() + reach * torch.randn(columns.shape, generator=rng).to(columns.device)
        found = difference_map(evidence, known, start=shaken, iterations=iterations)
        polished = evidence.polished(found.columns, known)
        better = evidence.residual(polished) < evidence.residual(columns)
        columns = torch.where(better[:, None], polished, columns)
    return Found(columns, evidence.accepts(columns, known))


def _share(known: Analytics) -> Tensor:
    """Every entry's probability from the counts alone, (users, rounds)."""
    length = (known.tiles < known.rounds).sum(1)
    middle = known.rate[:, None] * length
    expected = torch.minimum(torch.maximum(middle, known.tile_least), known.tile_most.double()) / length
    share = known.untiled(expected[..., None].expand(-1, -1, known.tiles.shape[1]))
    share = torch.where(known.fixed >= 0, known.fixed.double(), share)
    return share.float()


def _linear(space: SignalSpace, known: Analytics) -> tuple[Tensor, Tensor]:
    """Orthonormal equations (rounds, equations) and what they give for each user: of the sums, and of exact counts."""
    certain = (known.tile_least == known.tile_most).all(0)
    tiles = torch.zeros(int(certain.sum()), known.rounds + 1, dtype=space.sensing.dtype, device=space.sensing.device)
    tiles.scatter_(1, known.tiles[certain], 1.0)
    stacked = torch.cat([space.sensing, tiles[:, :-1].T], 1)
    wanted = torch.cat(
        [tiles.new_zeros(len(known.fixed), space.sensing.shape[1]), known.tile_least[:, certain].double()], 1
    )
    # Counts and sums may say the same thing twice: directions of no weight are left out.
    left, weights, right = torch.linalg.svd(stacked, full_matrices=False)
    kept = weights > 1e-6 * weights[0]
    return left[:, kept].float(), (wanted @ right[kept].T / weights[kept]).float()
