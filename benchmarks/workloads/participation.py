"""Who took part in which round: all users at once, beside one HiGHS integer program a user."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedprism.randomness import generator
from fedprism.solvers import recover_participation
from fedprism.solvers.participation.subspace import signal_space
from fedprism_papers.disaggregation.planted_participation import Federation, Planted, plant, program_seconds
from workloads.base import Clock, Comparison, Conditions, best_of, timed

USERS = (64, 256, 1024)
PROGRAMS = {64: 4, 256: 2, 1024: 1}
LIMIT = 30.0


def _program(planted: Planted, user: int) -> tuple[float, bool]:
    """Seconds of one user's program, without the space that all users share, and whether the clock stopped it."""
    cpu = torch.device("cpu")
    processor, clock = timed(cpu, lambda: program_seconds(planted, user, LIMIT))
    if not Clock.processor:
        return clock, clock >= LIMIT
    sums, users = planted.sums.cpu(), planted.matrix.shape[1]
    shared, _ = timed(cpu, lambda: signal_space(sums, expected_rank=users, cohort_sizes=None, device=cpu, seed=0))
    return processor - shared, clock >= LIMIT


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
        programs = [_program(planted, user) for user in range(PROGRAMS[users])]
        each = [seconds for seconds, _ in programs]
        stopped = sum(ended for _, ended in programs)
        yield Comparison(
            workload="participation recovery",
            size=f"{users} users, {2 * users} rounds",
            ours=ours,
            quality=f"{right:.0%} of the columns right",
            other="one HiGHS program a user",
            theirs=users * sum(each) / len(each),
            their_quality="stopped without an answer" if stopped else "right where it ends",
            extrapolated=True,
            note=f"{len(each)} run, {stopped} stopped after {LIMIT:g} s: at least" if stopped else f"{len(each)} run",
        )
        torch.cuda.empty_cache() if conditions.device.type == "cuda" else None
