"""Columns without counts: planted ones come back, nothing that only looks like one is called found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers import Participation, ParticipationStatus, UserStatus, recover_participation
from fedprism.solvers.participation import recovery, unnamed_search
from planting import Planted, counted, plant, sums_of

FOUND = {UserStatus.UNNAMED, UserStatus.SOLVED, UserStatus.CERTIFIED, UserStatus.GIVEN}


def columns_of(matrix: Tensor) -> set[tuple[bool, ...]]:
    return {tuple(column) for column in matrix.T.tolist()}


def said_found(found: Participation) -> set[tuple[bool, ...]]:
    kept = torch.tensor([status in FOUND for status in found.statuses], dtype=torch.bool)
    return columns_of(found.matrix[:, kept])


# --- what it must solve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "rounds", "rate"), [(20, 400, 0.05), (100, 400, 0.1), (60, 300, 0.2), (40, 300, 0.3), (20, 200, 0.5)]
)
def test_all_columns_come_back_without_any_count(users: int, rounds: int, rate: float) -> None:
    planted = plant(users, rounds, rate=rate)
    found = recover_participation(planted.sums)
    assert columns_of(found.matrix) == columns_of(planted.matrix)
    assert found.statuses == (UserStatus.UNNAMED,) * users
    assert found.status is ParticipationStatus.UNNAMED
    assert not bool(found.certified.any())


def test_counts_that_are_all_unknown_are_no_counts() -> None:
    planted = plant(50, 300)
    found = recover_participation(planted.sums, planted.windows, torch.full(planted.counts.shape, -1))
    assert columns_of(found.matrix) == columns_of(planted.matrix)
    assert found.status is ParticipationStatus.UNNAMED


@pytest.mark.parametrize("know_users", [True, False])
def test_noise_hides_neither_columns_nor_how_many_there_are(know_users: bool) -> None:
    planted = plant(50, 300, parameters=1000, noise=0.3)
    found = recover_participation(planted.sums, users=50 if know_users else None)
    assert said_found(found) <= columns_of(planted.matrix)
    assert len(said_found(found)) >= 48


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_two_users_are_not_taken_for_one(seed: int) -> None:
    planted = plant(30, 200, rate=0.05, seed=seed)  # most pairs of users never meet
    matrix = planted.matrix
    disjoint = (matrix.T.double() @ matrix.double() == 0).sum()
    assert int(disjoint) > 30
    assert said_found(recover_participation(planted.sums)) <= columns_of(matrix)


def test_a_column_that_could_be_exchanged_for_another_is_not_called_found() -> None:
    matrix = plant(20, 200, rate=0.1, seed=1).matrix.clone()
    matrix[:, 0] = False
    matrix[:2, 0] = True  # whoever took part twice only: any column without these rounds may be its own plus this one
    matrix[:2, 1:] = False
    matrix[0, 2] = matrix[1, 3] = True
    found = recover_participation(sums_of(matrix).sums)
    assert columns_of(found.matrix) <= columns_of(matrix)
    uncertain = [status for status in found.statuses if status is UserStatus.UNCERTAIN]
    assert len(uncertain) >= 15


def test_too_few_rounds_are_not_called_found() -> None:
    planted = plant(25, 40)
    found = recover_participation(planted.sums)
    assert said_found(found) <= columns_of(planted.matrix)
    assert found.status in (ParticipationStatus.PARTIAL, ParticipationStatus.PARTIAL_UNNAMED)


def test_noise_alone_has_no_columns() -> None:
    sums = torch.randn(100, 200, generator=torch.Generator().manual_seed(0))
    for users in (None, 10):
        assert said_found(recover_participation(sums, users=users)) == set()


def test_rounds_may_be_silent_and_users_always_there() -> None:
    matrix = plant(30, 250, rate=0.1, seed=2).matrix.clone()
    matrix[::10] = False
    everyone = matrix.clone()
    everyone[:, 0] = True
    found = recover_participation(sums_of(matrix).sums)
    assert columns_of(found.matrix) == columns_of(matrix)
    found = recover_participation(sums_of(everyone).sums)
    assert columns_of(everyone) <= columns_of(found.matrix)


# --- names -----------------------------------------------------------------------------------------------------------


def test_one_total_for_each_user_names_those_that_are_alone_with_theirs() -> None:
    planted = plant(40, 300)
    window = torch.ones(1, 300, dtype=torch.long)
    totals = counted(window, planted.matrix)
    found = recover_participation(planted.sums, window, totals, certify=False, time_limit=0.1)
    alone = torch.tensor([int((totals == total).sum()) == 1 for total in totals[:, 0]])
    named = torch.tensor([status is UserStatus.SOLVED for status in found.statuses])
    assert columns_of(found.matrix) == columns_of(planted.matrix)
    assert torch.equal(named, alone)
    assert torch.equal(found.matrix[:, alone], planted.matrix[:, alone])
    assert found.status is ParticipationStatus.UNNAMED
    tied = int((~alone).nonzero()[0])
    assert len(found.alternatives[tied]) == int((totals == totals[tied]).sum()) - 1


def test_what_is_known_of_some_rounds_names_users() -> None:
    planted = plant(30, 250)
    known = torch.full(planted.matrix.shape, -1.0)
    known[:100] = planted.matrix[:100].float()
    found = recover_participation(planted.sums, known=known)
    assert torch.equal(found.matrix, planted.matrix)
    assert set(found.statuses) <= {UserStatus.SOLVED, UserStatus.CERTIFIED}


def test_columns_of_nobody_who_is_counted_come_after_the_users() -> None:
    planted = plant(40, 300)
    few = planted.counts[:5]
    found = recover_participation(
        planted.sums, planted.windows, torch.where(torch.arange(30) < 2, few, -1), certify=False
    )
    assert found.matrix.shape == (300, 40)
    assert columns_of(found.matrix) == columns_of(planted.matrix)


# --- input and interrupts --------------------------------------------------------------------------------------------


def test_windows_without_counts_are_refused() -> None:
    planted = plant(10, 60)
    with pytest.raises(ValueError, match="windows and counts belong together, but only windows are given"):
        recover_participation(planted.sums, planted.windows)


def interrupted(planted: Planted, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Participation:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, stop)
    return recover_participation(planted.sums, planted.windows, planted.counts)


def test_an_interrupt_while_the_sums_are_read_returns_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = interrupted(plant(10, 60), monkeypatch, recovery, "signal_space")
    assert found.status is ParticipationStatus.STOPPED
    assert found.matrix.shape == (60, 10)
    assert set(found.statuses) == {UserStatus.UNSOLVED}


@pytest.mark.parametrize("name", ["search_by_messages", "search_quickly", "prove"])
def test_an_interrupt_at_any_stage_returns_what_was_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = interrupted(plant(40, 120), monkeypatch, recovery, name)
    assert found.matrix.shape == (120, 40)
    assert (found.status is ParticipationStatus.COMPLETE) == (name == "prove")


def test_an_interrupted_search_without_counts_keeps_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(100, 400)
    settled = unnamed_search.settled
    calls = 0

    def stop_later(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        return settled(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(unnamed_search, "settled", stop_later)
    found = recover_participation(planted.sums)
    assert 0 < len(said_found(found) & columns_of(planted.matrix)) < 100
    assert columns_of(found.matrix) - columns_of(planted.matrix) <= {(False,) * 400}
    assert found.status is ParticipationStatus.PARTIAL_UNNAMED


# --- long histories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_long_histories_never_make_a_matrix_of_all_pairs_of_rounds(noise: float) -> None:
    planted = plant(10, 3000, parameters=60, noise=noise, rate=0.2)
    found = recover_participation(planted.sums, planted.windows, planted.counts, users=10, certify=False)
    assert torch.equal(found.matrix, planted.matrix)
