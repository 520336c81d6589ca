"""Lattice reduction: columns near the limit of what the sums tell, each of them checked."""

from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.solvers.participation import lattice
from fedprism.solvers.participation.integer_program import ColumnProgram
from fedprism.solvers.participation.lattice import LatticeUnavailable, recover_by_lattice
from planting import Planted, plant, sums_of


def programs_of(planted: Planted, users: range, tolerance: float = 1e-5, **changes: Any) -> list[ColumnProgram]:
    left, values, _ = np.linalg.svd(planted.sums.double().numpy())
    sensing = left[:, int((values > 1e-5 * values[0]).sum()) :]
    rounds = len(sensing)
    return [
        ColumnProgram(
            complement=sensing,
            tolerance=tolerance,
            sums=planted.windows.double().numpy(),
            lower=planted.counts[user].double().numpy(),
            upper=planted.counts[user].double().numpy(),
            fixed=np.full(rounds, -1, dtype=np.int8),
            excluded=np.zeros((0, rounds), dtype=bool),
            **changes,
        )
        for user in users
    ]


@pytest.fixture(autouse=True)
def package() -> None:
    pytest.importorskip("fpylll")


@pytest.mark.quality
@pytest.mark.parametrize(
    ("users", "rounds", "rate", "others"),
    # Four equations leave up to four users other columns that do as well, more of them seldom more than one.
    [(64, 96, 0.1, 4), (40, 60, 0.3, 4), (40, 80, 0.5, 4), (40, 44, 0.2, 10)],
)
def test_every_planted_column_is_found(users: int, rounds: int, rate: float, others: int) -> None:
    planted = plant(users, rounds, rate=rate)
    programs = programs_of(planted, range(users))
    columns = recover_by_lattice(programs)
    assert all(column is not None and one.fulfilled_by(column) for one, column in zip(programs, columns, strict=True))
    assert_planted_or_equally_good(np.stack(columns), planted, fewest=users - others)  # type: ignore[arg-type]


def solved(columns: list[np.ndarray | None]) -> list[bool]:
    return [column is not None for column in columns]


def assert_planted_or_equally_good(columns: np.ndarray, planted: Planted, *, fewest: int) -> None:
    """A column that is not the planted one must be a combination of users' columns: no sums could tell it apart."""
    matrix = planted.matrix.double().numpy()
    wrong = np.any(columns != planted.matrix.T.numpy()[: len(columns)], axis=1)
    for column in columns[wrong].astype(float):
        weights = np.linalg.lstsq(matrix, column, rcond=None)[0]
        np.testing.assert_allclose(matrix @ weights, column, atol=1e-10)
    assert len(columns) - wrong.sum() >= fewest


@pytest.mark.quality
def test_single_precision_is_enough_where_a_shared_basis_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four equations of six digits: whole-number vectors that fulfil them by chance are as short as combinations of a
    # few columns, until the counts are put in.
    planted = plant(64, 68, rate=0.2)
    programs = programs_of(planted, range(6), tolerance=1e-6)
    columns = recover_by_lattice(programs)
    assert solved(columns) == [True] * 6
    assert_planted_or_equally_good(np.stack(columns), planted, fewest=5)  # type: ignore[arg-type]
    embed = lattice._embed
    monkeypatch.setattr(lattice, "_embed", lambda *a: None if a[-1].shape[1] else embed(*a))
    # None or one of six.
    assert sum(solved(recover_by_lattice(programs))) < 4, "the shared basis is enough here: nothing was tested"


def test_missing_inexact_and_partly_known() -> None:
    planted = plant(30, 60, rate=0.2)
    (one,) = programs_of(planted, range(1))
    truth = planted.matrix[:, 0].numpy()
    missing = replace(one, lower=np.r_[-np.inf, one.lower[1:]], upper=np.r_[np.inf, one.upper[1:]])
    inexact = replace(one, lower=np.r_[one.lower[0] - 1, one.lower[1:]], upper=np.r_[one.upper[0] + 1, one.upper[1:]])
    fixed = np.where(np.arange(60) < 15, truth, -1).astype(np.int8)
    for program in (missing, inexact, replace(one, fixed=fixed), replace(missing, fixed=fixed)):
        (column,) = recover_by_lattice([program])
        np.testing.assert_array_equal(column, truth)


def test_a_column_that_is_excluded_or_contradicts_is_not_answered() -> None:
    planted = plant(30, 60, rate=0.2)
    (one,) = programs_of(planted, range(1))
    truth = planted.matrix[:, 0].numpy()
    contradiction = replace(one, lower=one.lower + 1, upper=one.upper)
    elsewhere = replace(one, lower=one.lower[::-1].copy(), upper=one.upper[::-1].copy())
    columns = recover_by_lattice([one.without(truth), contradiction, elsewhere, one])
    assert solved(columns) == [False, False, False, True]


def test_the_other_of_two_users_with_the_same_counts() -> None:
    matrix = plant(20, 40, rate=0.2).matrix
    matrix[:, 1] = matrix[:, 0].reshape(4, 10).roll(1, dims=1).flatten()
    planted = sums_of(matrix)
    assert torch.equal(planted.counts[0], planted.counts[1])
    first, second = (matrix[:, user].numpy() for user in (0, 1))
    (one,) = programs_of(planted, range(1))
    columns = recover_by_lattice([one.without(first), one.without(second)])
    np.testing.assert_array_equal(columns, [second, first])


def test_sums_that_nobody_made_have_no_column() -> None:
    # Everyone took part: no sums contradict a user who never did.
    planted = sums_of(plant(20, 40).matrix | torch.eye(40, 20, dtype=torch.bool))
    noise = torch.randn(planted.sums.shape[0], 20, generator=torch.Generator().manual_seed(5))
    assert recover_by_lattice(programs_of(planted._replace(sums=noise), range(4))) == [None] * 4


def test_limits_and_nothing_to_do() -> None:
    programs = programs_of(plant(20, 40), range(3))
    assert solved(recover_by_lattice(programs)) == [True] * 3
    assert recover_by_lattice(programs, time_limit=0.0) == [None] * 3
    assert recover_by_lattice([]) == []
    no_equations = replace(programs[0], complement=np.zeros((40, 0)))
    assert recover_by_lattice([no_equations]) == [None]


def test_a_reduction_that_breaks_down_loses_its_own_column_only(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of(plant(20, 40), range(3))
    search = lattice._search

    def outgrown(reduction: Any, program: ColumnProgram, shared: Any) -> Any:
        if program is programs[1]:
            raise OverflowError("too large")
        return search(reduction, program, shared)

    monkeypatch.setattr(lattice, "_search", outgrown)
    assert solved(recover_by_lattice(programs)) == [True, False, True]

    def broken(*_: Any) -> Any:
        raise RuntimeError("no precision left")

    monkeypatch.setattr(lattice, "_solutions", broken)  # without a basis that all share, each has its own equations
    assert solved(recover_by_lattice(programs)) == [True, False, True]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "fpylll":
            raise ImportError("no such package")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LatticeUnavailable, match=r"fedprism\[lattice\]"):
        recover_by_lattice([])
