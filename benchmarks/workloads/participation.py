"""Who took part in which round: all users at once, beside one HiGHS integer program a user."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedprism.randomness import generator
from fedprism.recipes.planted_participation import Federation, plant, program_seconds
from fedprism.solvers import recover_participation
from workloads.base import Comparison, Conditions, best_of

USERS = (64, 256, 1024)
PROGRAMS = {64: 4, 256: 2, 1024: 1}
LIMIT = 30.0


def participation(conditions: Conditions) -> Iterator[Comparison]:
    warm = plant(Federation(users=16, rounds=48), generator(0), conditions.device)
    recover_participation(warm.sums, warm.windows, warm.counts, users=16)
    for users in USERS:
        federation = Federation(users=users, rounds=2 * users, parameters=10_000)
        planted = plant(federation, generator(0, "bench", users), conditions.device)

        def run(planted=planted, users=users):  # type: ignore[no-untyped-def]
            return recover_participation(planted.sums, planted.windows, planted.counts, users=users, certify=False)

        ours, found = best_of(2, conditions.device, run)
        right = float((found.matrix.cpu() == planted.matrix).all(0).float().mean())
        each = [program_seconds(planted, user, LIMIT) for user in range(PROGRAMS[users])]
        stopped = sum(seconds >= LIMIT for seconds in each)
        yield Comparison(
            workload="participation recovery",
            size=f"{users} users, {2 * users} rounds",
            ours=ours,
            quality=f"{right:.0%} of the columns right",
            other="one HiGHS program a user",
            theirs=users * sum(each) / len(each),
            their_quality="stopped without an answer" if stopped else "right where it ends",
            extrapolated=True,
            note=f"{len(each)} programs run, {stopped} stopped after {LIMIT:g} s" if stopped else f"{len(each)} run",
        )
        torch.cuda.empty_cache() if conditions.device.type == "cuda" else None
