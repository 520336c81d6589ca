"""The paper's Algorithm 1 on the same sums: hard-threshold SVD, then one integer program for each user, by HiGHS.

Lam et al., "Gradient Disaggregation", ICML 2021, algorithm 1 and equation 7.

Differs from the paper in: HiGHS solves no mixed-integer quadratic programs, so the sum of absolute residuals is
minimised instead of their squares; a few users stand for all, because each program may take minutes.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism.solvers.participation.integer_program import ColumnProgram, solve_column
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.shared.base import Announce, Measured, Settings

ALGORITHM_1 = "paper's Algorithm 1"
TRIALS = 1
COLUMNS, QUICK_COLUMNS = 3, 1
"""Users whose program is solved."""
LIMIT, QUICK_LIMIT = 60.0, 10.0
"""Seconds for one program; the paper allows 180 to 600 on a commercial solver."""
ALGORITHM_1_SAID = (
    f"{ALGORITHM_1}: {COLUMNS} users of {TRIALS} trial, {LIMIT:g} s of HiGHS each (quick: {QUICK_COLUMNS} user, "
    f"{QUICK_LIMIT:g} s), absolute instead of squared residuals; right are columns that are exactly the planted "
    "ones, and seconds are those of all users, extrapolated."
)


def measure(federation: planted.Federation, settings: Settings, announce: Announce) -> Measured:
    """The part of some users' columns that the algorithm gets right."""
    users, limit = (QUICK_COLUMNS, QUICK_LIMIT) if settings.quick else (COLUMNS, LIMIT)
    right, seconds, stopped = list[float](), list[float](), 0
    for trial in range(TRIALS):
        announce(f"{ALGORITHM_1}: {federation.users} users, {federation.rounds} rounds")
        rng = generator(settings.seed, "participation", federation, trial)
        plant = planted.plant(federation, rng, devices.pick("cpu"))
        complement = outside_of_signal(plant.sums.double().numpy(), federation.users)
        columns = list[bool]()
        start = time.perf_counter()
        for user in range(users):
            column, timed_out = solve(plant, complement, user, limit)
            columns.append(column is not None and bool(np.array_equal(column, plant.matrix[:, user].numpy())))
            stopped += timed_out
        right.append(sum(columns) / users)
        seconds.append((time.perf_counter() - start) * federation.users / users)
    return Measured(
        values={planted.COLUMNS: tuple(right)},
        seconds=tuple(seconds),
        statuses=(f"{stopped} of {users * TRIALS} programs were stopped after {limit:g} s",),
    )


def outside_of_signal(sums: np.ndarray, users: int) -> np.ndarray:
    """(rounds, rounds - users): what is orthogonal to the leading directions of the sums, one for each user."""
    left, _, _ = np.linalg.svd(sums, full_matrices=True)
    outside: np.ndarray = left[:, users:]
    return outside


def solve(plant: planted.Planted, complement: np.ndarray, user: int, limit: float) -> tuple[np.ndarray | None, bool]:
    """A user's column, and whether the time was up."""
    rounds = len(complement)
    counts = plant.counts[user].double().numpy()
    program = ColumnProgram(
        complement=complement,
        tolerance=float(np.sqrt(rounds)),  # no bound: no residual of zeros and ones is longer
        sums=plant.windows.double().numpy(),
        lower=counts,
        upper=counts,
        fixed=torch.full((rounds,), -1).numpy(),
        excluded=np.zeros((0, rounds), dtype=bool),
        objective="least residual",
        time_limit=limit,
    )
    start = time.perf_counter()
    column = solve_column(program).column
    return column, time.perf_counter() - start >= limit
