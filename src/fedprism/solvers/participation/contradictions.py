"""Counts that no column can keep, found before anything is searched for and named by user and window."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from fedprism.solvers.participation.integer_program import OUTCOMES, ColumnOutcome, Floats

PATIENCE = 5.0
"""Seconds for one user; counts that take longer to refute are left to the search, which finds no column for them."""


def check_agreement(windows: Tensor, least: Tensor, most: Tensor, fixed: Tensor) -> None:
    """Raise a ValueError where windows overlap and some user's counts (users, windows) cannot all be true.

    Rounds that lie in the same windows are alike to the counts: the unknowns are how many of them a user took part in.
    Disjoint windows are left out, because one at a time tells whether they can be kept.
    """
    if not len(windows) or int(windows.sum(0).max()) < 2:
        return
    kinds, members = torch.unique(windows, dim=1, return_inverse=True)
    belongs = torch.nn.functional.one_hot(members, kinds.shape[1]).double()
    ones, free = (fixed == 1).double() @ belongs, (fixed < 0).double() @ belongs
    everything = torch.cat([least.double(), most.double(), ones, ones + free], 1).cpu().numpy()
    matrix = kinds.double().cpu().numpy()
    split = np.cumsum([len(windows), len(windows), kinds.shape[1]])
    for same in np.unique(everything, axis=0):  # users of whom the same is known are looked at once
        lower, upper, fewest, largest = np.split(same, split)
        if _possible(matrix, lower, upper, fewest, largest):
            continue
        user = int((everything == same).all(1).argmax())
        window = next(
            number
            for number in range(len(matrix))
            if not _possible(matrix[: number + 1], lower[: number + 1], upper[: number + 1], fewest, largest)
        )
        raise ValueError(disagreement(user, window, int(lower[window]), int(upper[window])))


def disagreement(user: int, window: int, least: int, most: int) -> str:
    """The sentence about a count that cannot be true together with what else is known."""
    times = str(least) if least == most else f"{least} to {most}"
    return (
        f"counts contradict each other: user {user} cannot have taken part {times} times in window {window}. "
        "Check this user's counts and what else is known of it."
    )


def _possible(matrix: Floats, lower: Floats, upper: Floats, fewest: Floats, largest: Floats) -> bool:
    """Whether whole numbers between `fewest` and `largest` have sums over the windows between `lower` and `upper`."""
    answer = milp(
        np.zeros(matrix.shape[1]),
        integrality=np.ones(matrix.shape[1]),
        bounds=Bounds(fewest, largest),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"time_limit": PATIENCE},
    )
    return OUTCOMES.get(answer.status) is not ColumnOutcome.INFEASIBLE
