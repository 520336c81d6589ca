"""Integer programs for single columns: found where planted, proved where absent, checked against every possibility."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedprism.runtime.executors import Failure, Processes, Serial
from fedprism.solvers.participation import integer_program
from fedprism.solvers.participation.integer_program import (
    ColumnOutcome,
    ColumnProgram,
    ColumnSolution,
    solve_column,
    solved_columns,
)
from planting import disjoint_windows, plant, sums_of


def complement(sums: Any) -> np.ndarray:
    """(rounds, equations) of sums given in single precision."""
    left, values, _ = np.linalg.svd(np.asarray(sums, dtype=np.float64))
    return left[:, int((values > 1e-5 * values[0]).sum()) :]


def program(sensing: np.ndarray, windows: Any, counts: Any, **changes: Any) -> ColumnProgram:
    rounds, counts = len(sensing), np.asarray(counts, dtype=np.float64)
    whole = ColumnProgram(
        complement=sensing,
        tolerance=1e-5,
        sums=np.asarray(windows, dtype=np.float64),
        lower=counts,
        upper=counts,
        fixed=np.full(rounds, -1, dtype=np.int8),
        excluded=np.zeros((0, rounds), dtype=bool),
    )
    return replace(whole, **changes)


def all_solutions(one: ColumnProgram, most: int = 2000) -> set[tuple[bool, ...]]:
    """Solve again and again without the columns that came before, until it is proved that there are no more."""
    columns: list[np.ndarray] = []
    while (column := solve_column(one.without(*columns)).column) is not None:
        columns.append(column)
        assert len(columns) <= most
    assert solve_column(one.without(*columns)).outcome is ColumnOutcome.INFEASIBLE
    return {tuple(column.tolist()) for column in columns}


@pytest.mark.parametrize(("users", "rounds"), [(40, 80), (48, 72)])
def test_a_planted_column_is_found_and_proved_to_be_the_only_one(users: int, rounds: int) -> None:
    planted = plant(users, rounds)
    sensing = complement(planted.sums)
    for user in range(8):
        one = program(sensing, planted.windows, planted.counts[user])
        column = planted.matrix[:, user].numpy()
        solution = solve_column(one)
        assert solution.outcome is ColumnOutcome.FOUND
        assert solution.column is not None
        assert one.fulfilled_by(solution.column)
        assert tuple(column.tolist()) in all_solutions(one, most=4)


def every_solution(one: ColumnProgram) -> set[tuple[bool, ...]]:
    everything = np.array(list(itertools.product([False, True], repeat=len(one.complement))))
    totals = everything @ one.sums.T
    kept = np.all((totals >= one.lower) & (totals <= one.upper), axis=1)
    kept &= np.all((one.fixed < 0) | (everything == one.fixed), axis=1)
    kept &= np.all(np.abs(everything @ one.complement) <= one.tolerance, axis=1)
    return {tuple(column) for column in everything[kept].tolist()}


@pytest.mark.parametrize("knowledge", ["exact", "inexact", "missing", "partly known", "overlapping"])
def test_all_solutions_and_no_others_are_found(knowledge: str) -> None:
    rng = np.random.default_rng(0)
    ambiguous = 0
    for seed in range(12):
        rounds, users = int(rng.integers(6, 12)), int(rng.integers(3, 8))
        planted = plant(users, rounds, rate=0.5, window=3, seed=seed)
        one = program(complement(planted.sums), planted.windows, planted.counts[0])
        truth = planted.matrix[:, 0].numpy()
        if knowledge == "inexact":
            one = replace(one, lower=one.lower - 1, upper=one.upper + 1)
        if knowledge == "missing":
            one = replace(one, lower=np.r_[-np.inf, one.lower[1:]], upper=np.r_[np.inf, one.upper[1:]])
        if knowledge == "partly known":
            one = replace(one, fixed=np.where(rng.random(rounds) < 0.3, truth, -1).astype(np.int8))
        if knowledge == "overlapping":
            sums = np.vstack([one.sums, disjoint_windows(rounds, 4).numpy()])
            one = replace(one, sums=sums, lower=sums @ truth, upper=sums @ truth)
        expected = every_solution(one)
        assert tuple(truth.tolist()) in expected
        ambiguous += len(expected) > 1
        assert all_solutions(one) == expected
    assert ambiguous, "every planted column was the only one: nothing was tested"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"lower": [1.0, 1.0], "upper": [4.0, 1.0]}, ColumnOutcome.FOUND),
        ({"lower": [2.0, 5.0], "upper": [2.0, 5.0]}, ColumnOutcome.INFEASIBLE),  # five of four rounds
        ({"lower": [2.0, -1.0], "upper": [2.0, -1.0]}, ColumnOutcome.INFEASIBLE),
        ({"lower": [3.0, 0.0], "upper": [3.0, 0.0], "fixed": [0, 0, -1, -1, -1, -1, -1, -1]}, ColumnOutcome.INFEASIBLE),
        ({"lower": [4.0, 0.0], "upper": [4.0, 0.0]}, ColumnOutcome.FOUND),  # decided by the counts alone
        ({"lower": [0.0, 4.0], "upper": [0.0, 4.0], "excluded": [[0] * 4 + [1] * 4]}, ColumnOutcome.INFEASIBLE),
        ({"time_limit": 0.0}, ColumnOutcome.TIME_LIMIT),
    ],
)
def test_outcomes_of_programs_without_equations(changes: dict[str, Any], outcome: ColumnOutcome) -> None:
    one = program(np.zeros((8, 1)), disjoint_windows(8, 4), [2, 2])
    kinds = {"fixed": np.int8, "excluded": bool}
    changes = {k: v if k == "time_limit" else np.asarray(v, dtype=kinds.get(k)) for k, v in changes.items()}
    one = replace(one, **changes)
    solution = solve_column(one)
    assert solution.outcome is outcome
    assert (solution.column is not None) == (outcome is ColumnOutcome.FOUND)
    assert solution.column is None or one.fulfilled_by(solution.column)


def test_a_round_that_two_windows_decide_differently_is_a_contradiction() -> None:
    windows = np.array([[1, 1, 0], [0, 1, 1]])
    assert solve_column(program(np.zeros((3, 1)), windows, [2, 0])).outcome is ColumnOutcome.INFEASIBLE


def test_noise_the_column_with_the_least_residual() -> None:
    planted = plant(20, 50, noise=0.2, parameters=600)
    left, _, _ = np.linalg.svd(planted.sums.double().numpy())
    for user in range(4):
        one = program(left[:, 20:], planted.windows, planted.counts[user], tolerance=np.inf, objective="least residual")
        column = planted.matrix[:, user].numpy()
        assert np.abs(left[:, 20:].T @ column).max() > 1e-3, "there is noise"
        solution = solve_column(one)
        assert solution.outcome is ColumnOutcome.FOUND
        assert np.array_equal(solution.column, column)
        runner_up = solve_column(one.without(column)).column
        assert runner_up is not None
        assert np.abs(left[:, 20:].T @ runner_up).sum() > np.abs(left[:, 20:].T @ column).sum()


def test_what_the_solver_says_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ColumnSolution(np.ones(8, dtype=bool), ColumnOutcome.FOUND)
    monkeypatch.setattr(integer_program, "_branch_and_bound", lambda *_: wrong)
    solution = solve_column(program(np.zeros((8, 1)), disjoint_windows(8, 4), [2, 2]))
    assert solution.outcome is ColumnOutcome.FAILED
    assert solution.column is None


def test_a_column_that_only_the_solver_takes_for_one_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = integer_program._branch_and_bound, []

    def first_wrong(one: ColumnProgram, decided: np.ndarray, seconds: float) -> Any:
        asked.append(len(one.excluded))
        return (
            ColumnSolution(np.ones(8, dtype=bool), ColumnOutcome.FOUND)
            if len(asked) == 1
            else real(one, decided, seconds)
        )

    monkeypatch.setattr(integer_program, "_branch_and_bound", first_wrong)
    one = program(np.zeros((8, 1)), disjoint_windows(8, 4), [2, 2])
    solution = solve_column(one)
    assert solution.outcome is ColumnOutcome.FOUND
    assert solution.column is not None
    assert one.fulfilled_by(solution.column)
    assert asked == [0, 1]


class OneCrash:
    """An executor in which the second task is lost."""

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for index, task in reversed(list(enumerate(tasks))):
            yield index, Failure("its process ended") if index == 1 else function(task)


def test_a_lost_program_loses_no_other() -> None:
    one = program(np.zeros((8, 1)), disjoint_windows(8, 4), [2, 2])
    solutions = dict(solved_columns([one] * 3, OneCrash()))
    outcomes = [solutions[index].outcome for index in range(3)]
    assert outcomes == [ColumnOutcome.FOUND, ColumnOutcome.FAILED, ColumnOutcome.FOUND]


def test_a_program_that_raises_fails_alone() -> None:
    one = program(np.zeros((8, 1)), disjoint_windows(8, 4), [2, 2])
    broken = replace(one, complement=np.zeros((5, 1)))
    first, second = (solution for _, solution in solved_columns([broken, one], Serial()))
    assert first.outcome is ColumnOutcome.FAILED
    assert second.outcome is ColumnOutcome.FOUND


def test_processes_give_the_same_answers() -> None:
    planted = plant(24, 48)
    sensing = complement(planted.sums)
    programs = [program(sensing, planted.windows, planted.counts[user]) for user in range(6)]
    here, there = (
        [solution for _, solution in sorted(solved_columns(programs, executor), key=lambda pair: pair[0])]
        for executor in (Serial(), Processes(workers=2))
    )
    assert [s.outcome for s in here] == [s.outcome for s in there]
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.column, other.column)
    assert sorted(index for index, _ in solved_columns(iter(programs[:2]), Serial())) == [0, 1]
    assert isinstance(pickle.loads(pickle.dumps(here[0])), ColumnSolution)


def test_a_user_who_never_and_one_who_always_takes_part() -> None:
    matrix = plant(12, 40, rate=0.3).matrix
    matrix[:, 0], matrix[:, 1] = False, True
    planted = sums_of(matrix)
    sensing = complement(planted.sums)
    for user in (0, 1):
        solution = solve_column(program(sensing, planted.windows, planted.counts[user]))
        np.testing.assert_array_equal(solution.column, matrix[:, user].numpy())
