"""Planted participation: random updates summed over random cohorts, and how much of the matrix comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism import devices, solvers
from fedprism.randomness import generator
from fedprism.recipes.base import Announce, Outcome, Row, Settings
from fedprism.solvers.participation.integer_program import ColumnProgram, solve_column
from fedprism.solvers.participation.subspace import signal_space

CITATION = (
    'Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by '
    'Reconstructing the User Participant Matrix", ICML 2021'
)
EXACT, COLUMNS, ENTRIES = "trials exact", "columns right", "entries right"
CERTIFIED, WRONG = "certified", "certified wrong"
SURE, SURE_WRONG = "said", "said wrongly"
SAID = (
    "said: columns that the solver itself calls found; said wrongly: the share of all users for whom that is not so. "
    "No integer program and no lattice is used here."
)
TRIALS, QUICK_TRIALS = 30, 1
TIME_LIMIT = 20.0
"""Seconds a trial for lattices and integer programs, together."""

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
    federation: Federation,
    settings: Settings,
    announce: Announce,
    *,
    know_cohorts: bool = False,
    trials: int = TRIALS,
) -> Outcome:
    """Recover as many planted federations as there are trials. A trial is exact where every entry is right."""
    device = devices.pick(settings.device)
    trials = settings.batches or (QUICK_TRIALS if settings.quick else trials)
    values: dict[str, list[float]] = {name: [] for name in (EXACT, COLUMNS, ENTRIES, CERTIFIED, WRONG)}
    seconds: list[float] = []
    statuses: list[str] = []
    for trial in range(trials):
        announce(f"{federation.users} users, {federation.rounds} rounds, trial {trial + 1} of {trials}")
        planted = plant(federation, generator(settings.seed, "participation", federation, trial), device)
        start = time.perf_counter()
        found = solvers.recover_participation(
            planted.sums,
            planted.windows,
            planted.counts,
            users=federation.users,
            cohort_sizes=planted.matrix.sum(1) if know_cohorts else None,
            time_limit=TIME_LIMIT,
            seed=settings.seed,
        )
        seconds.append(time.perf_counter() - start)
        right = found.matrix.cpu() == planted.matrix
        columns, certified = right.all(0), found.certified.cpu()
        values[EXACT].append(float(columns.all()))
        values[COLUMNS].append(float(columns.float().mean()))
        values[ENTRIES].append(float(right.float().mean()))
        values[CERTIFIED].append(float(certified.float().mean()))
        values[WRONG].append(float((certified & ~columns).float().mean()))
        statuses.append(found.status.value)
    return Outcome(values={k: tuple(v) for k, v in values.items()}, seconds=tuple(seconds), statuses=tuple(statuses))


def program_seconds(planted: Planted, user: int, limit: float) -> float:
    """Seconds for one user's integer program; the space of the sums, which all users share, is not counted."""
    sums = planted.sums.cpu()
    space = signal_space(
        sums,
        expected_rank=planted.matrix.shape[1],
        factors=None,
        cohort_sizes=None,
        device=torch.device("cpu"),
        seed=0,
    )
    counts = planted.counts[user].double().numpy()
    program = ColumnProgram(
        complement=space.sensing.numpy(),
        tolerance=1e-5,
        sums=planted.windows.double().numpy(),
        lower=counts,
        upper=counts,
        fixed=torch.full((len(sums),), -1).numpy(),
        excluded=torch.zeros(0, len(sums), dtype=torch.bool).numpy(),
        time_limit=limit,
    )
    start = time.perf_counter()
    solve_column(program)
    return time.perf_counter() - start


def curves(
    rows: Sequence[Row], curve: str, along: str, name: str, *, method: str = "ours"
) -> dict[str, list[tuple[float, float]]]:
    """The share of right columns along a column of the table, one curve for each value of another."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        entry = row.entries[method]
        if isinstance(entry, Outcome):
            point = float(row.cell[along]), entry.mean(COLUMNS)
            found.setdefault(f"{name} {row.cell[curve]}", []).append(point)
    return found
