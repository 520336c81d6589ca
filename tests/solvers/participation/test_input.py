"""What recovery is given: every form of it read alike, every contradiction refused by name, and interrupts survived."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedprism.runtime.executors import Processes, RayCluster
from fedprism.solvers import (
    Participation,
    ParticipationStatus,
    UserStatus,
    disaggregate,
    identifiable_users,
    recover_participation,
)
from fedprism.solvers.participation import exact_search, proofs, quick_search
from fedprism.solvers.participation.analytics import read_analytics
from planting import Planted, counted, plant, sums_of


def recover(planted: Planted, **options: Any) -> Participation:
    options = {"time_limit": 0.0, **options}
    return recover_participation(planted.sums, planted.windows, planted.counts, **options)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are not there are not searched for long."""
    monkeypatch.setattr(quick_search, "difference_map", partial(quick_search.difference_map, iterations=100))


def changed(values: Tensor, place: Any, value: float) -> Tensor:
    other = values.double().clone()
    other[place] = value
    return other


# --- sums ------------------------------------------------------------------------------------------------------------


def test_a_memory_map_of_another_byte_order(tmp_path: Path) -> None:
    planted = plant(40, 100)
    np.save(tmp_path / "sums.npy", planted.sums.numpy().astype(">f4"))
    mapped = np.load(tmp_path / "sums.npy", mmap_mode="r")
    found = recover_participation(mapped, planted.windows, planted.counts, certify=False)
    assert torch.equal(found.matrix, planted.matrix)
    assert torch.allclose(disaggregate(mapped, found.matrix).double(), planted.updates, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_blocks_are_let_go_of_once_they_are_read(noise: float) -> None:
    planted = plant(40, 100, parameters=3000, noise=noise)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def blocks() -> Iterator[Tensor]:
        nonlocal most
        for part in planted.sums.split(100, dim=1):
            block = part.clone()
            alive.append(weakref.ref(block))
            most = max(most, sum(one() is not None for one in alive))
            yield block

    found = recover_participation(blocks(), planted.windows, planted.counts, users=40, certify=False)
    assert torch.equal(found.matrix, planted.matrix)
    assert most <= 2  # the one that is read, and the one before it
    assert len(alive) == 30


def test_whole_numbers_and_as_few_parameters_as_users() -> None:
    planted = plant(30, 100)
    rounded = recover(planted._replace(sums=(planted.sums * 1e4).long()), certify=False)
    assert rounded.rank == 30
    assert torch.equal(rounded.matrix, planted.matrix)
    narrow = plant(40, 100, parameters=40)  # the smallest singular value stands alone, but it is no noise
    found = recover(narrow, certify=False)
    assert found.rank == 40
    assert torch.equal(found.matrix, narrow.matrix)
    assert found.status is ParticipationStatus.ASSUMED_RANK


# --- what else is given ----------------------------------------------------------------------------------------------


COHORTS = plant(20, 50).matrix.sum(1)
BUSY = int(COHORTS.argmax())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"users": 0}, "users must be at least 1, not 0"),
        ({"count_tolerance": -1}, "count_tolerance must be a whole number of at least 0, not -1"),
        ({"count_tolerance": 0.5}, "count_tolerance must be a whole number of at least 0, not 0.5"),
        (
            {"cohort_sizes": changed(COHORTS, 3, float("nan"))},
            "each cohort size must be a .*number.*nan in round 3",
        ),
        ({"cohort_sizes": changed(COHORTS, 3, -1)}, "each cohort size .* not -1 in round 3"),
        ({"cohort_sizes": changed(COHORTS, BUSY, 0)}, f"round {BUSY} has a sum, although"),
        ({"cohort_sizes": COHORTS, "known": torch.ones(50, 20)}, "more users are known .* in round 0 .*: 20 of"),
        ({"cohort_sizes": torch.ones(4)}, "one size per round"),
        ({"known": torch.full((50, 20), -2.0)}, "of 0, 1, -1 and NaN"),
    ],
)
def test_senseless_options_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recover(plant(20, 50), **options)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"counts": torch.tensor(5)}, "shapes are \\(5, 50\\) and \\(\\)"),
        ({"counts": torch.zeros(0, 5)}, "at least one user"),
        ({"counts": torch.full((20, 5), -7)}, "NaN or -1 if unknown, not -7 for user 0 in window 0"),
        ({"sums": torch.zeros(0, 40)}, "there are no rounds"),
    ],
)
def test_senseless_counts_and_sums_get_a_sentence(changes: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recover(plant(20, 50)._replace(**changes))


def spans(rounds: int, *ends: tuple[int, int]) -> Tensor:
    numbers = torch.arange(rounds)
    return torch.stack([(numbers >= start) & (numbers < stop) for start, stop in ends]).long()


@pytest.mark.parametrize(
    ("windows", "window", "off"),
    [
        (spans(50, (0, 25), (25, 50), (0, 25)), 2, 1),  # the same window with another count
        (spans(50, *[(start, start + 10) for start in range(0, 50, 10)], (0, 50)), 5, -1),  # a total that is none
        (spans(50, (0, 50), (0, 20), (20, 40), (40, 50)), 3, 1),
        (spans(50, *[(start, start + 10) for start in range(0, 45, 5)], (0, 10), (10, 20), (0, 20)), 11, 1),
    ],
    ids=["twice", "total", "parts", "sliding"],
)
def test_overlapping_counts_that_cannot_be_name_user_and_window(windows: Tensor, window: int, off: int) -> None:
    counts = counted(windows, plant(20, 50, rate=0.3).matrix)
    nothing = torch.zeros(50, dtype=torch.bool)
    assert len(read_analytics(windows, counts, None, nothing, 0).fixed) == 20
    counts[4, window] += off
    sentence = f"user 4 cannot have taken part {int(counts[4, window])} times in window {window}[.]"
    with pytest.raises(ValueError, match=sentence):
        read_analytics(windows, counts, None, nothing, 0)
    for possible, tolerance in ((changed(counts, (4, window), -1), 0), (counts, 1)):
        assert len(read_analytics(windows, possible, None, nothing, tolerance).fixed) == 20
    with pytest.raises(ValueError, match=sentence):
        recover(plant(20, 50, rate=0.3)._replace(windows=windows, counts=counts))


@pytest.mark.usefixtures("impatient")
def test_a_count_may_exceed_its_window_by_the_tolerance() -> None:
    matrix = plant(20, 60).matrix.clone()
    matrix[:10, 2] = True
    planted = sums_of(matrix)
    beyond = planted._replace(counts=changed(planted.counts, (2, 0), 11))
    found = recover(beyond, count_tolerance=1, certify=False)
    assert bool(found.matrix[:10, 2].all())
    with pytest.raises(ValueError, match="user 2 counted 11 times in window 0 of 10 rounds"):
        recover(beyond)


def test_cohorts_that_hold_uncounted_users_decide_nothing() -> None:
    planted = plant(60, 140)
    some = planted._replace(counts=planted.counts[:40], matrix=planted.matrix[:, :40])
    found = recover(some, cohort_sizes=planted.matrix.sum(1), certify=False)
    assert found.rank == 60
    assert torch.equal(found.matrix, some.matrix)


# --- users who cannot be told apart ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_all_columns_that_would_do_are_listed_and_no_others() -> None:
    matrix = plant(8, 18, rate=0.3, window=6, seed=3).matrix
    for user in (1, 2):  # three users with the same counts
        matrix[:, user] = matrix[:, 0].reshape(3, 6).roll(user, dims=1).flatten()
    planted = sums_of(matrix, window=6)
    found = recover(planted, time_limit=60.0)
    everything = torch.tensor(list(itertools.product([False, True], repeat=18)))
    left, values, _ = torch.linalg.svd(matrix.double())
    outside = left[:, int((values > 1e-9).sum()) :]
    spanned = (everything.double() @ outside).abs().amax(1) < 1e-9
    for user in range(8):
        kept = spanned & (everything.long() @ planted.windows.T == planted.counts[user]).all(1)
        expected = {tuple(column) for column in everything[kept].tolist()}
        listed = found.alternatives.get(user, torch.zeros(0, 18, dtype=torch.bool))
        assert {tuple(found.matrix[:, user].tolist()), *map(tuple, listed.tolist())} == expected
        assert (found.statuses[user] is UserStatus.AMBIGUOUS) == (len(expected) > 1)
    assert all(len(found.alternatives[user]) >= 2 for user in (0, 1, 2))


# --- users who send nothing of their own -----------------------------------------------------------------------------


def without_update(planted: Planted, user: int) -> Planted:
    updates = planted.updates.clone()
    updates[user] = 0
    return planted._replace(sums=(planted.matrix.double() @ updates).float(), updates=updates)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", [6, 8])
def test_a_user_who_sends_zeros_is_not_certified_to_be_another(seed: int) -> None:
    planted = without_update(plant(12, 36, seed=seed), 3)
    found = recover(planted, time_limit=0.5)
    right = (found.matrix == planted.matrix).all(0)
    assert not bool(right[3])  # the column of a user with the same counts, or a combination that has them
    assert not bool((found.certified & ~right).any())
    assert bool((found.certified & right).any())
    assert (found.statuses[3] is UserStatus.CERTIFIED) == bool(found.certified[3])


@pytest.mark.usefixtures("impatient")
def test_a_round_of_zeros_does_not_contradict_counts() -> None:
    matrix = plant(40, 110).matrix.clone()
    matrix[17] = False
    matrix[17, 3] = True  # only the one who sends zeros
    matrix[10:17, 3] = matrix[18:20, 3] = True
    planted = without_update(sums_of(matrix), 3)
    others = torch.arange(40) != 3
    for options in ({}, {"cohort_sizes": matrix.sum(1)}):
        found = recover(planted, certify=False, **options)
        assert torch.equal(found.matrix[:, others], matrix[:, others])
    found = recover(planted._replace(sums=torch.zeros(110, 9)), certify=False)
    assert found.status is ParticipationStatus.NO_REDUNDANCY
    assert UserStatus.SOLVED not in found.statuses


# --- interrupts, progress, executors ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("module", "stage"),
    [(quick_search, "difference_map"), (exact_search, "recover_by_lattice"), (proofs, "distance_of_others")],
)
def test_an_interrupt_at_any_stage_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, stage: str
) -> None:
    planted = plant(64, 96)
    whole = recover(planted, certify=False)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, stage, interrupt)
    found = recover(planted, time_limit=60.0 if stage == "recover_by_lattice" else 0.0)
    solved = torch.tensor([status is UserStatus.SOLVED for status in found.statuses])
    assert int(solved.sum()) > 8
    assert torch.equal(found.matrix[:, solved], whole.matrix[:, solved])
    assert not bool(found.certified.any())


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    recover(plant(40, 100), progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert all(0 <= done <= total for done, total in seen)


# Ray leaves files and pipes of its own open when it is shut down.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("executor", [Processes(workers=1), RayCluster()], ids=repr)
def test_proofs_are_the_same_wherever_they_are_found(executor: Any) -> None:
    if isinstance(executor, RayCluster):
        pytest.importorskip("ray")
    planted = plant(40, 84, seed=2)
    dual = recover(planted)
    enough = 3_600.0  # programs share the limit and end far below it, also side by side on a busy machine
    here = recover(planted, time_limit=enough)
    there = recover(planted, time_limit=enough, executor=executor)
    assert int(here.certified.sum()) > int(dual.certified.sum()), "no program was needed: nothing was tested"
    assert torch.equal(here.matrix, there.matrix)
    assert torch.equal(here.certified, there.certified)


# --- updates ---------------------------------------------------------------------------------------------------------


def test_sums_and_matrix_that_do_not_fit_are_refused() -> None:
    planted = plant(20, 50)
    broken = planted.sums.clone()
    broken[7, 3] = float("nan")
    for function in (disaggregate, lambda sums, matrix: identifiable_users(matrix, aggregates=sums)):
        with pytest.raises(ValueError, match="the sums hold 50 and the matrix 40"):
            function(planted.sums, planted.matrix[:40])
        with pytest.raises(ValueError, match="NaN or infinity in round 7"):
            function(broken, planted.matrix)
        with pytest.raises(ValueError, match="matrix \\(rounds, users\\) must be finite"):
            function(planted.sums, planted.matrix[:, :0])


def test_sums_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no parameters"):
        disaggregate(torch.zeros(50, 0), plant(20, 50).matrix)


def test_error_bars_say_what_they_are_in_units_of() -> None:
    planted = plant(20, 50, noise=0.1, parameters=400)
    measured = identifiable_users(planted.matrix, aggregates=planted.sums)
    assert measured.noise is not None
    relative = identifiable_users(planted.matrix)
    assert relative.noise is None
    assert torch.allclose(measured.error, measured.noise * relative.error)
    assert identifiable_users(torch.eye(5), aggregates=torch.randn(5, 7)).noise is None
