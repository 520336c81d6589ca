"""Planted participation: random updates summed over random cohorts, and how much of the matrix comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprism import solvers
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism.solvers.participation.integer_program import ColumnProgram, Objective, solve_column
from fedprism.solvers.participation.subspace import signal_space
from fedprism_papers.shared.base import Announce, Measured, Row, Settings, curve

CITATION = (
    'Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by '
    'Reconstructing the User Participant Matrix", ICML 2021'
)
EXACT, COLUMNS, ENTRIES = "trials exact", "columns right", "entries right"
CERTIFIED, WRONG = "certified", "certified wrong"
SURE, SURE_WRONG, NOISE = "said", "said wrongly", "noise"
GUESSED, UPDATES, UPDATES_WRONG = "columns right, named or not", "called found", "found wrongly"
NAMED, NAMED_WRONG = "named", "named wrongly"
COLUMNS_FOUND = (
    f"{GUESSED}: users whose column is among those that the solver returns, if only as best guess; {UPDATES}: those "
    f"of them that it calls found; {UPDATES_WRONG}: columns that it calls found and no user has; {NAMED}: users whose "
    f"column is found under their own name; {NAMED_WRONG}: under another's. All relative to the number of users. Each "
    "user's update comes out with a name or without. No integer program and no lattice is used here."
)
USABLE = frozenset({solvers.UserStatus.SOLVED, solvers.UserStatus.CERTIFIED, solvers.UserStatus.GIVEN})
"""What the solver says of a column that it recovered."""
SAID = (
    "said: columns that the solver itself calls found; said wrongly: the fraction of all users for whom that is not "
    "so. No integer program and no lattice is used here."
)
TRIALS, QUICK_TRIALS = 30, 1  # federations per setting
TIME_LIMIT = 20.0
"""Seconds a trial for lattices and integer programs, together."""
SMALLEST_RESIDUAL = 1e-5
"""What rounding leaves of a right column outside the space of the sums."""

PLANTED = (
    "Planted: every user takes part in every round with the given probability and sends the same normal vector each "
    "time; the server sees the sum of each round in single precision and each user's count in disjoint windows."
)
FIGURES_ONLY = (
    "The paper shows curves without numbers; it solves one mixed-integer program a user, by Gurobi on 64 cores."
)


@dataclass(frozen=True, kw_only=True)
class Federation:
    """How many take part in what. `noise` is the standard deviation of what every user adds anew in every round."""

    users: int
    rounds: int
    rate: float = 0.1
    window: int = 10
    parameters: int | None = None
    noise: float = 0.0


@dataclass(frozen=True)
class Planted:
    sums: Tensor
    windows: Tensor
    counts: Tensor
    matrix: Tensor
    updates: Tensor


def disjoint_windows(rounds: int, length: int) -> Tensor:
    """(windows, rounds): the first `length` rounds, the next, and so on; the last window may be shorter."""
    numbers = torch.arange(rounds) // length
    return (numbers == torch.arange(int(numbers[-1]) + 1)[:, None]).long()


def plant(federation: Federation, rng: torch.Generator, device: torch.device) -> Planted:
    users, rounds = federation.users, federation.rounds
    parameters = federation.parameters or 2 * users
    matrix = torch.rand(rounds, users, generator=rng) < federation.rate
    updates = torch.randn(users, parameters, generator=rng).to(device)
    sums = matrix.to(device, torch.float32) @ updates
    if federation.noise:
        each = federation.noise * matrix.sum(1, keepdim=True).sqrt()
        sums += (each * torch.randn(rounds, parameters, generator=rng)).to(device)
    windows = disjoint_windows(rounds, federation.window)
    return Planted(sums, windows, (windows @ matrix.long()).T, matrix, updates)


def measure(
    federation: Federation, settings: Settings, announce: Announce, *, know_cohorts: bool = False, trials: int = TRIALS
) -> Measured:
    """Recover as many planted federations as there are trials."""
    device = devices.pick(settings.device)
    trials = settings.batches_or(trials, QUICK_TRIALS)
    outcomes = list[Measured]()
    for trial in range(trials):
        announce(f"{federation.users} users, {federation.rounds} rounds, trial {trial + 1} of {trials}")
        planted = plant(federation, generator(settings.seed, "participation", federation, trial), device)
        outcome = recover(
            planted,
            (EXACT, COLUMNS, ENTRIES, CERTIFIED, WRONG),
            cohort_sizes=planted.matrix.sum(1) if know_cohorts else None,
            time_limit=TIME_LIMIT,
            seed=settings.seed,
        )
        outcomes.append(outcome)
    return merged(outcomes)


def recover(planted: Planted, metrics: Sequence[str], **options: Any) -> Measured:
    """What the solver makes of one federation. A trial is exact if every entry is right."""
    start = _now(planted.sums.device)
    solution = solvers.recover_participation(
        planted.sums, planted.windows, planted.counts, users=planted.matrix.shape[1], **options
    )
    seconds = _now(planted.sums.device) - start
    users = planted.matrix.shape[1]
    matrix, certified = solution.matrix.cpu()[:, :users], solution.certified.cpu()[:users]
    right = matrix == planted.matrix
    columns = right.all(0)
    sure = torch.tensor([status in USABLE for status in solution.statuses[:users]])
    found = torch.tensor([status in {*USABLE, solvers.UserStatus.UNNAMED} for status in solution.statuses])
    real = is_among(solution.matrix.cpu().T, planted.matrix.T)
    values: dict[str, Tensor | float] = {
        EXACT: columns.all(),
        COLUMNS: columns.double().mean(),
        ENTRIES: right.double().mean(),
        CERTIFIED: certified.double().mean(),
        WRONG: (certified & ~columns).double().mean(),
        SURE: sure.double().mean(),
        SURE_WRONG: (sure & ~columns).double().mean(),
        NOISE: solution.noise,
        GUESSED: is_among(planted.matrix.T, solution.matrix.cpu().T).double().mean(),
        UPDATES: float((found & real).sum()) / users,
        UPDATES_WRONG: float((found & ~real).sum()) / users,
        NAMED: (sure & columns).double().mean(),
        NAMED_WRONG: (sure & ~columns).double().mean(),
    }
    return Measured(
        values={metric: (float(values[metric]),) for metric in metrics},
        seconds=(seconds,),
        statuses=(solution.status.value,),
    )


def is_among(columns: Tensor, others: Tensor) -> Tensor:
    """(any,): whether a column (any, rounds) is one of the others."""
    known = {tuple(column) for column in others.tolist()}
    return torch.tensor([tuple(column) in known for column in columns.tolist()])


def merged(outcomes: Sequence[Measured]) -> Measured:
    """Several trials as one entry of a table."""
    return Measured(
        values={name: tuple(outcome.values[name][0] for outcome in outcomes) for name in outcomes[0].values},
        seconds=tuple(outcome.seconds[0] for outcome in outcomes),
        statuses=tuple(outcome.statuses[0] for outcome in outcomes),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def solve_program(
    planted: Planted, user: int, complement: np.ndarray, tolerance: float, objective: Objective, limit: float
) -> tuple[np.ndarray | None, float]:
    """A user's column by an integer program, and the seconds that it took.

    complement (rounds, any) is orthogonal to the space of the sums, which all users share and which is not timed.
    """
    counts = planted.counts[user].double().numpy()
    program = ColumnProgram(
        complement=complement,
        tolerance=tolerance,
        sums=planted.windows.double().numpy(),
        lower=counts,
        upper=counts,
        fixed=np.full(len(complement), -1),
        excluded=np.zeros((0, len(complement)), dtype=bool),
        objective=objective,
        time_limit=limit,
    )
    start = time.perf_counter()
    column = solve_column(program).column
    return column, time.perf_counter() - start


def program_seconds(planted: Planted, user: int, limit: float) -> float:
    """Seconds for one user's integer program where sums are free of noise."""
    users, place = planted.matrix.shape[1], torch.device("cpu")
    space = signal_space(planted.sums.cpu(), expected_rank=users, cohort_sizes=None, device=place, seed=0)
    return solve_program(planted, user, space.sensing.numpy(), SMALLEST_RESIDUAL, "any", limit)[1]


def curves(rows: Sequence[Row], name: str, along: str, method: str) -> dict[str, list[tuple[float, float]]]:
    """The fraction of right columns along a column of the table, one curve for each value of another, and of users."""
    points: dict[str, list[tuple[float, float]]] = {}
    several = name != "users" and len({row.cell["users"] for row in rows}) > 1
    for row in rows:
        of_users = f", {row.cell['users']} users" if several else ""
        points.setdefault(f"{name} {row.cell[name]}{of_users}", []).extend(
            curve([row], along, method, lambda entry: entry.mean(COLUMNS))
        )
    return points
