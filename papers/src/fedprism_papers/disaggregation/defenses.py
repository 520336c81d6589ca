"""What stops disaggregation: coarser or blurred counts, noise, re-weighting, a model that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.defenses import (
    BlurredCounts,
    CountRelease,
    GeometricCounts,
    LaplaceCounts,
    RoundedCounts,
    WithheldCounts,
)
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings

FEDERATION = planted.Federation(users=100, rounds=400, parameters=10_000)
QUICK_FEDERATION = planted.Federation(users=20, rounds=160, parameters=300)
TRIALS = 3  # per defense
COST = "error of the sum"
METRICS = (planted.GUESSED, planted.UPDATES, planted.UPDATES_WRONG, planted.NAMED, planted.NAMED_WRONG)


class Defended(NamedTuple):
    """What the server is left with, how counts were released, and how far a round's sum is from what it would have
    been."""

    left: planted.Planted
    release: CountRelease = CountRelease()
    cost: float = 0.0


Defend = Callable[[planted.Planted, torch.Generator], Defended]


def counted_in(length: int, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Counts over longer windows."""
    windows = planted.disjoint_windows(len(federation.matrix), length)
    return Defended(replace(federation, windows=windows, counts=(windows @ federation.matrix.long()).T))


def released(release: CountRelease, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Counts as this release reports them."""
    counts = release.release(federation.counts, federation.windows.sum(1), rng)
    return Defended(replace(federation, counts=counts), release)


def no_counts(federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Nothing is counted at all."""
    return released(WithheldCounts(1.0), federation, rng)


def without_counts(defend: Defend, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Another defense, and nothing is counted."""
    defended = defend(federation, rng)
    return no_counts(defended.left, rng)._replace(cost=defended.cost)


def noised(size: float, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Each user's update changes from round to round by noise."""
    sums = federation.sums
    each = size * federation.matrix.to(sums).sum(1, keepdim=True).sqrt()
    return _with_sums(federation, sums + each * torch.randn(sums.shape, generator=rng).to(sums))


def weighted(size: float, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """Each user's update changes from round to round by a random factor."""
    factors = 1 + size * (2 * torch.rand(federation.matrix.shape, generator=rng) - 1).to(federation.sums)
    return _with_sums(federation, (federation.matrix.to(factors) * factors) @ federation.updates)


def _with_sums(federation: planted.Planted, sums: Tensor) -> Defended:
    cost = float((sums - federation.sums).norm() / federation.sums.norm())
    return Defended(replace(federation, sums=sums), cost=cost)


def drifting(rounds: float, federation: planted.Planted, rng: torch.Generator) -> Defended:
    """The model is not frozen: every update turns away from itself, by half within this many rounds."""
    keep = 0.5 ** (1 / rounds)
    updates, sums = federation.updates, torch.empty_like(federation.sums)
    for number, took_part in enumerate(federation.matrix):
        sums[number] = took_part.to(updates) @ updates
        fresh = torch.randn(updates.shape, generator=rng).to(updates.device)
        updates = keep * updates + (1 - keep**2) ** 0.5 * fresh
    return Defended(replace(federation, sums=sums))


COUNTS: dict[str, Defend] = {
    "none: counts in windows of 10": partial(counted_in, 10),
    "counts in windows of 50": partial(counted_in, 50),
    "counts in windows of 100": partial(counted_in, 100),
    "one count over all rounds": partial(counted_in, 10**9),
    "30 % of the counts withheld": partial(released, WithheldCounts(0.3)),
    "60 % of the counts withheld": partial(released, WithheldCounts(0.6)),
    "all counts withheld": no_counts,
    "counts off by up to 1": partial(released, BlurredCounts(1)),
    "counts off by up to 2": partial(released, BlurredCounts(2)),
    "counts rounded to fives": partial(released, RoundedCounts(5)),
    "counts with Laplace noise, epsilon 1": partial(released, LaplaceCounts(1.0)),
    "counts with geometric noise, epsilon 1": partial(released, GeometricCounts(1.0)),
    "counts with Laplace noise, epsilon 0.1": partial(released, LaplaceCounts(0.1)),
}
UPDATES: dict[str, Defend] = {
    "noise of 0.1 on updates of 1": partial(noised, 0.1),
    "noise of 1": partial(noised, 1.0),
    "noise of 3": partial(noised, 3.0),
    "weights drawn from 0.9 to 1.1": partial(weighted, 0.1),
    "weights drawn from 0.5 to 1.5": partial(weighted, 0.5),
    "weights drawn from 0 to 2": partial(weighted, 1.0),
    "updates half new after 1,000 rounds": partial(drifting, 1000),
    "updates half new after 100 rounds": partial(drifting, 100),
    "updates half new after 10 rounds": partial(drifting, 10),
}
DEFENSES: dict[str, Defend] = {
    **COUNTS,
    **UPDATES,
    **{f"{name}, all counts withheld": partial(without_counts, defend) for name, defend in UPDATES.items()},
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    device = devices.pick(settings.device)
    federation = QUICK_FEDERATION if settings.quick else FEDERATION
    for name, defend in DEFENSES.items():
        outcomes, costs = list[Measured](), list[float]()
        for trial in range(settings.batches_or(TRIALS)):
            announce(f"{name}, trial {trial + 1}")
            plant = planted.plant(federation, generator(settings.seed, "plant", trial), device)
            defended = defend(plant, generator(settings.seed, "defend", name, trial))
            likelihood = None if defended.release.exact else defended.release.log_likelihood
            options = {"count_likelihood": likelihood, "time_limit": 0.0, "seed": settings.seed}
            outcomes.append(planted.recover(defended.left, METRICS, **options))
            costs.append(defended.cost)
        outcome = planted.merged(outcomes)
        yield Row(
            cell={"defense": name},
            entries={"attacked": replace(outcome, values={**outcome.values, COST: tuple(costs)})},
        )


RECIPE = Recipe(
    name="disaggregation-defenses",
    summary="What stops the recovery of participation: 100 users, 400 rounds, participation .1, 10,000 parameters",
    citation=f"{planted.CITATION}; the defenses are named there, not measured",
    shown=(*METRICS, COST),
    run=run,
    options=("batches",),
    notes=(
        planted.PLANTED,
        planted.COLUMNS_FOUND,
        f"{COST}: what the defense changes in a round's sum, relative to its length: what training pays for it.",
        "The attacker knows how counts were released.",
    ),
)
