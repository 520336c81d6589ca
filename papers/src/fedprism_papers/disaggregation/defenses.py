"""What stops disaggregation: coarser or blurred counts, noise, re-weighting, a model that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.shared.base import Announce, Outcome, Recipe, Row, Settings

USERS, ROUNDS, PARAMETERS = 100, 400, 10_000
QUICK_USERS, QUICK_ROUNDS, QUICK_PARAMETERS = 20, 60, 300
TRIALS = 3
COST = "error of the sum"


class Defended(NamedTuple):
    """What the server is left with, and how far a round's sum is from the one it would have had."""

    left: planted.Planted
    tolerance: int = 0
    cost: float = 0.0


Defend = Callable[[planted.Planted, torch.Generator], Defended]


def counted_in(length: int) -> Defend:
    """Counts over longer windows."""

    def defend(federation: planted.Planted, rng: torch.Generator) -> Defended:
        windows = planted.disjoint_windows(len(federation.matrix), length)
        return Defended(replace(federation, windows=windows, counts=(windows @ federation.matrix.long()).T))

    return defend


def withheld(probability: float) -> Defend:
    """Each count is missing with this probability."""

    def defend(federation: planted.Planted, rng: torch.Generator) -> Defended:
        hidden = torch.rand(federation.counts.shape, generator=rng) < probability
        return Defended(replace(federation, counts=torch.where(hidden, -1, federation.counts)))

    return defend


def blurred(most: int) -> Defend:
    """Each count is off by up to this many; the attacker knows how many."""

    def defend(federation: planted.Planted, rng: torch.Generator) -> Defended:
        shift = torch.randint(-most, most + 1, federation.counts.shape, generator=rng)
        counts = torch.minimum((federation.counts + shift).clamp(min=0), federation.windows.sum(1))
        return Defended(replace(federation, counts=counts), tolerance=most)

    return defend


def varying(size: float, *, along: bool) -> Defend:
    """Each user's update changes from round to round: by noise, or by a random factor (`along` itself)."""

    def defend(federation: planted.Planted, rng: torch.Generator) -> Defended:
        device = federation.sums.device
        matrix = federation.matrix.to(device, torch.float32)
        if along:
            factors = 1 + size * (2 * torch.rand(federation.matrix.shape, generator=rng).to(device) - 1)
            sums = (matrix * factors) @ federation.updates
        else:
            each = size * matrix.sum(1, keepdim=True).sqrt()
            sums = federation.sums + each * torch.randn(federation.sums.shape, generator=rng).to(device)
        cost = float((sums - federation.sums).norm() / federation.sums.norm())
        return Defended(replace(federation, sums=sums), cost=cost)

    return defend


def drifting(rounds: float) -> Defend:
    """The model is not frozen: every update turns away from itself, by half within this many rounds."""

    def defend(federation: planted.Planted, rng: torch.Generator) -> Defended:
        keep = 0.5 ** (1 / rounds)
        updates, sums = federation.updates, torch.empty_like(federation.sums)
        for number, took_part in enumerate(federation.matrix):
            sums[number] = took_part.to(updates.device, torch.float32) @ updates
            fresh = torch.randn(updates.shape, generator=rng).to(updates.device)
            updates = keep * updates + (1 - keep**2) ** 0.5 * fresh
        return Defended(replace(federation, sums=sums))

    return defend


DEFENSES: dict[str, Defend] = {
    "none: counts in windows of 10": counted_in(10),
    "counts in windows of 50": counted_in(50),
    "counts in windows of 100": counted_in(100),
    "one count over all rounds": counted_in(10**9),
    "30 % of the counts withheld": withheld(0.3),
    "60 % of the counts withheld": withheld(0.6),
    "all counts withheld": withheld(1.0),
    "counts off by up to 1": blurred(1),
    "counts off by up to 2": blurred(2),
    "noise of 0.1 on updates of 1": varying(0.1, along=False),
    "noise of 1": varying(1.0, along=False),
    "noise of 3": varying(3.0, along=False),
    "weights drawn from 0.9 to 1.1": varying(0.1, along=True),
    "weights drawn from 0.5 to 1.5": varying(0.5, along=True),
    "weights drawn from 0 to 2": varying(1.0, along=True),
    "updates half new after 1,000 rounds": drifting(1000),
    "updates half new after 100 rounds": drifting(100),
    "updates half new after 10 rounds": drifting(10),
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    device = devices.pick(settings.device)
    users, rounds, parameters = USERS, ROUNDS, PARAMETERS
    if settings.quick:
        users, rounds, parameters = QUICK_USERS, QUICK_ROUNDS, QUICK_PARAMETERS
    federation = planted.Federation(users=users, rounds=rounds, parameters=parameters)
    for name, defend in DEFENSES.items():
        outcomes, costs = list[Outcome](), list[float]()
        for trial in range(settings.batches_or(TRIALS)):
            announce(f"{name}, trial {trial + 1}")
            plant = planted.plant(federation, generator(settings.seed, "plant", trial), device)
            defended = defend(plant, generator(settings.seed, "defend", name, trial))
            metrics = (planted.COLUMNS, planted.SURE, planted.SURE_WRONG)
            options = {"count_tolerance": defended.tolerance, "time_limit": 0.0, "seed": settings.seed}
            outcomes.append(planted.recover(defended.left, metrics, **options))
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
    shown=(planted.COLUMNS, planted.SURE, planted.SURE_WRONG, COST),
    run=run,
    notes=(
        planted.PLANTED,
        planted.SAID,
        f"{COST}: what the defense changes in a round's sum, relative to its length: what training pays for it.",
        "The attacker knows how far counts may be off.",
    ),
)
