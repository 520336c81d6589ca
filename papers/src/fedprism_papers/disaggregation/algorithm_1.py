"""The paper's Algorithm 1 on the same sums: hard-threshold SVD, then one integer program for each user, by HiGHS.

Lam et al., "Gradient Disaggregation", ICML 2021, algorithm 1 and equation 7.

Differs from the paper in: HiGHS solves no mixed-integer quadratic programs, so the sum of absolute residuals is
minimised instead of their squares; a few users stand for all, because each program may take minutes.
"""

from __future__ import annotations

import numpy as np

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.shared.base import Announce, Measured, Settings

ALGORITHM_1 = "paper's Algorithm 1"
COLUMNS, QUICK_COLUMNS = 3, 1
"""Users whose program is solved."""
LIMIT, QUICK_LIMIT = 60.0, 10.0
"""Seconds for one program; the paper allows 180 to 600 on a commercial solver."""
ALGORITHM_1_SAID = (
    f"{ALGORITHM_1}: {COLUMNS} users of the first trial, {LIMIT:g} s of HiGHS each (quick: {QUICK_COLUMNS}, "
    f"{QUICK_LIMIT:g} s), absolute instead of squared residuals; right are columns that are exactly the planted "
    "ones, and seconds are those of all users, extrapolated."
)


def measure(federation: planted.Federation, settings: Settings, announce: Announce) -> Measured:
    """The part of some users' columns that the algorithm gets right."""
    users, limit = (QUICK_COLUMNS, QUICK_LIMIT) if settings.quick else (COLUMNS, LIMIT)
    announce(f"{ALGORITHM_1}: {federation.users} users, {federation.rounds} rounds")
    rng = generator(settings.seed, "participation", federation, 0)  # the first trial's sums
    plant = planted.plant(federation, rng, devices.pick("cpu"))
    complement = outside_of_signal(plant.sums.double().numpy(), federation.users)
    unbounded = float(np.sqrt(federation.rounds))  # no residual of zeros and ones is longer
    right, seconds = list[bool](), list[float]()
    for user in range(users):
        column, spent = planted.solve_program(plant, user, complement, unbounded, "least residual", limit)
        right.append(column is not None and bool(np.array_equal(column, plant.matrix[:, user].numpy())))
        seconds.append(spent)
    return Measured(
        values={planted.COLUMNS: (sum(right) / users,)},
        seconds=(sum(seconds) * federation.users / users,),
        statuses=(f"{sum(spent >= limit for spent in seconds)} of {users} programs were stopped after {limit:g} s",),
    )


def outside_of_signal(sums: np.ndarray, users: int) -> np.ndarray:
    """(rounds, rounds - users): what is orthogonal to the leading directions of the sums, one for each user."""
    left, _, _ = np.linalg.svd(sums, full_matrices=True)
    outside: np.ndarray = left[:, users:]
    return outside
