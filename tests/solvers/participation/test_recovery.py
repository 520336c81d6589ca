"""Who took part when: planted matrices come back, and nothing wrong is ever called certain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprism.runtime.executors import Failure
from fedprism.solvers import Participation, ParticipationStatus, UserStatus, recover_participation
from fedprism.solvers.participation import quick_search
from planting import Planted, counted, disjoint_windows, plant, sums_of

USABLE = {UserStatus.CERTIFIED, UserStatus.SOLVED, UserStatus.GIVEN, UserStatus.INACTIVE}


def recover(planted: Planted, **options: object) -> Participation:
    return recover_participation(planted.sums, planted.windows, planted.counts, **options)  # type: ignore[arg-type]


def right_columns(found: Participation, planted: Planted) -> Tensor:
    return (found.matrix == planted.matrix).all(0)


# --- what it must solve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "rounds", "rate", "window"),
    [(64, 128, 0.1, 10), (100, 200, 0.1, 10), (50, 120, 0.2, 10), (50, 170, 0.5, 10), (60, 220, 0.1, 20)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_column_comes_back(users: int, rounds: int, rate: float, window: int, dtype: torch.dtype) -> None:
    planted = plant(users, rounds, rate=rate, window=window, dtype=dtype)
    found = recover(planted, certify=False, time_limit=4.0)
    assert torch.equal(found.matrix, planted.matrix)
    assert found.status is ParticipationStatus.COMPLETE
    assert found.rank == users
    assert float(found.residual.max()) < 1e-5


def test_at_two_rounds_a_user_nine_of_ten_are_proved_by_duality() -> None:
    planted = plant(100, 200)
    found = recover(planted, time_limit=0.0)
    assert torch.equal(found.matrix, planted.matrix)
    assert float(found.certified.float().mean()) >= 0.9


def test_at_two_rounds_a_user_nearly_all_is_proved() -> None:
    planted = plant(128, 256)
    found = recover(planted, time_limit=6.0)
    assert torch.equal(found.matrix, planted.matrix)
    assert float(found.certified.float().mean()) > 0.95


@pytest.mark.parametrize("know_cohorts", [False, True])
def test_noise_is_averaged_over_parameters(know_cohorts: bool) -> None:
    planted = plant(50, 120, parameters=4000, noise=0.5)
    found = recover(planted, users=50, cohort_sizes=planted.matrix.sum(1) if know_cohorts else None)
    assert torch.equal(found.matrix, planted.matrix)
    assert 0.2 < found.noise < 0.7


def test_hopeless_noise_is_not_called_solved() -> None:
    planted = plant(50, 100, parameters=200, noise=3.0)
    found = recover(planted, users=50, time_limit=0.0)
    wrong = ~right_columns(found, planted)
    assert bool(wrong.any())
    assert not any(found.statuses[user] in USABLE for user in wrong.nonzero()[:, 0].tolist())
    assert found.status is ParticipationStatus.PARTIAL


def test_the_number_of_users_is_read_off_and_doubt_is_said() -> None:
    planted = plant(60, 130)
    assert recover(planted).rank == 60
    noisy = recover(plant(60, 130, parameters=6000, noise=1.0))
    assert noisy.status in (ParticipationStatus.ASSUMED_RANK, ParticipationStatus.PARTIAL_ASSUMED_RANK)
    assert noisy.rank == 60


def test_users_who_are_not_counted_may_be_in_the_sums() -> None:
    planted = plant(60, 140)
    some = planted._replace(counts=planted.counts[:40], matrix=planted.matrix[:, :40])
    found = recover(some, time_limit=4.0)
    assert found.rank == 60
    assert torch.equal(found.matrix, some.matrix)


# --- forms of input --------------------------------------------------------------------------------------------------


def as_blocks(sums: Tensor) -> Iterator[Tensor]:
    yield from sums.split(7, dim=1)


@pytest.mark.parametrize(
    "form", [lambda s: s.numpy(), as_blocks, lambda s: list(s.split(33, dim=1))], ids=["array", "iterator", "list"]
)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_all_forms_of_sums_are_read_alike(form: Callable[[Tensor], object], noise: float) -> None:
    planted = plant(40, 100, parameters=1200, noise=noise)
    found = recover_participation(form(planted.sums), planted.windows.numpy(), planted.counts.tolist(), users=40)
    assert torch.equal(found.matrix, planted.matrix)


def test_a_memory_map_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(40, 100, parameters=5000)
    np.save(tmp_path / "sums.npy", planted.sums.numpy())
    monkeypatch.setattr("fedprism.solvers.participation.sums.BLOCK", 1000)
    mapped = np.load(tmp_path / "sums.npy", mmap_mode="r")
    assert torch.equal(recover_participation(mapped, planted.windows, planted.counts).matrix, planted.matrix)


# --- what is known ---------------------------------------------------------------------------------------------------


@pytest.mark.quality
@pytest.mark.parametrize("unknown", [float("nan"), -1.0])
def test_missing_counts(unknown: float) -> None:
    planted = plant(40, 130)
    counts = planted.counts.double()
    # Four of each user's thirteen: of a user who lost eight, another column was seen to explain the sums as well.
    hidden = torch.rand(counts.shape, generator=torch.Generator().manual_seed(2)).argsort(1) < 4
    counts[hidden] = unknown
    found = recover(planted._replace(counts=counts), time_limit=4.0)
    wrong = ~right_columns(found, planted)
    assert int(wrong.sum()) <= 3  # none in 13 of 14 draws, one in the other
    assert not bool((found.certified & wrong).any())
    assert int(found.certified.sum()) >= 32  # 38 to 40


def test_a_user_who_is_not_counted_at_all_may_be_any_user() -> None:
    planted = plant(40, 130)
    counts = planted.counts.double()
    counts[7] = float("nan")
    found = recover(planted._replace(counts=counts), time_limit=4.0)
    others = torch.arange(40) != 7
    assert bool(right_columns(found, planted)[others].all())
    assert not bool(found.certified[7])


def test_overlapping_windows_and_running_totals() -> None:
    planted = plant(40, 100)
    sliding = torch.stack([(torch.arange(100) >= s) & (torch.arange(100) < s + 10) for s in range(0, 100, 5)]).long()
    running = torch.stack([torch.arange(100) < end for end in range(10, 101, 10)]).long()
    for windows in (sliding, running):
        found = recover(planted._replace(windows=windows, counts=counted(windows, planted.matrix)))
        assert torch.equal(found.matrix, planted.matrix)


def test_irregular_windows_that_leave_rounds_out() -> None:
    planted = plant(40, 130)
    rng = torch.Generator().manual_seed(3)
    order = torch.randperm(130, generator=rng)[:120]
    windows = torch.zeros(12, 130, dtype=torch.long)
    for row, rounds in zip(windows, order.split([4, 16] * 6), strict=True):
        row[rounds] = 1
    found = recover(planted._replace(windows=windows, counts=counted(windows, planted.matrix)), time_limit=4.0)
    assert torch.equal(found.matrix, planted.matrix)


def test_counts_that_are_off_by_one() -> None:
    planted = plant(40, 140)
    rng = torch.Generator().manual_seed(4)
    shift = torch.randint(-1, 2, planted.counts.shape, generator=rng)
    lengths = planted.windows.sum(1)
    blurred = torch.minimum((planted.counts + shift).clamp(min=0), lengths)
    found = recover(planted._replace(counts=blurred), count_tolerance=1, time_limit=4.0)
    wrong = ~right_columns(found, planted)
    assert float(wrong.float().mean()) < 0.3
    assert not bool((found.certified & wrong).any())


def test_participation_known_in_part_is_used_and_kept() -> None:
    planted = plant(60, 84, seed=3)  # too few rounds for the counts alone
    alone = recover(planted, time_limit=0.0)
    known = planted.matrix.double()
    known[40:] = float("nan")
    found = recover(planted, known=known, time_limit=0.0)
    assert int(right_columns(found, planted).sum()) > int(right_columns(alone, planted).sum())
    assert torch.equal(found.matrix[:40], planted.matrix[:40])


def test_cohort_sizes_decide_what_is_left() -> None:
    for seed in range(1, 9):  # three of four draws have all the ground that this claim needs
        planted = plant(64, 88, seed=seed)
        alone = recover(planted, time_limit=0.0)
        right = right_columns(alone, planted)
        lost = torch.tensor([s in (UserStatus.UNSOLVED, UserStatus.UNCERTAIN) for s in alone.statuses])
        if bool((right | lost).all()) and not bool(right.all()):
            break
    else:
        pytest.fail("in every draw all columns were found, or a column that is not the planted one was")
    found = recover(planted, cohort_sizes=planted.matrix.sum(1), time_limit=0.0)
    assert torch.equal(found.matrix, planted.matrix)
    # Proofs rest on a user's own counts, not on what the others' columns leave of the cohorts.
    assert int(found.certified.sum()) <= int(alone.certified.sum()) + 8
    with pytest.raises(ValueError, match="cohort_sizes must hold one size per round"):
        recover(planted, cohort_sizes=planted.matrix.sum(1)[:-1])


# --- what cannot be told ---------------------------------------------------------------------------------------------


def test_users_with_equal_counts_are_named_with_their_alternatives() -> None:
    planted = plant(40, 100, seed=5)
    matrix = planted.matrix.clone()
    matrix[:, 1] = matrix[:, 0]
    matrix[:10, :2] = False
    matrix[0, 0] = matrix[1, 1] = True
    twins = sums_of(matrix, seed=5)
    assert torch.equal(twins.counts[0], twins.counts[1])
    found = recover(twins, time_limit=4.0)
    wrong = (~right_columns(found, twins)).nonzero()[:, 0].tolist()
    assert {found.statuses[user] for user in wrong} <= {UserStatus.AMBIGUOUS}
    assert {found.statuses[0], found.statuses[1]} == {UserStatus.AMBIGUOUS}
    columns = {tuple(found.matrix[:, user].tolist()) for user in (0, 1)}
    assert columns == {tuple(matrix[:, user].tolist()) for user in (0, 1)}  # both columns, whoever's they are
    for user in (0, 1):
        other = twins.matrix[:, 1] if torch.equal(found.matrix[:, user], twins.matrix[:, 0]) else twins.matrix[:, 0]
        assert any(torch.equal(column, other) for column in found.alternatives[user])


@pytest.mark.parametrize("seed", range(6))
def test_small_federations_have_no_wrong_certificates(seed: int) -> None:
    planted = plant(16, 32, seed=seed)
    found = recover(planted, time_limit=4.0)
    right = right_columns(found, planted)
    assert not bool((found.certified & ~right).any())
    for user, columns in found.alternatives.items():
        sums = (columns.double() @ planted.windows.double().T).long()
        assert bool((sums == planted.counts[user]).all())
    for user in (~right).nonzero()[:, 0].tolist():
        assert found.statuses[user] in (UserStatus.AMBIGUOUS, UserStatus.SOLVED, UserStatus.UNSOLVED)


def laid_out(layout: str, windows: Tensor) -> Tensor:
    """Other windows made of disjoint ones (windows, rounds)."""
    if layout == "overlapping":
        return torch.cat([windows, windows.roll(1, dims=1)])
    if layout == "running totals":
        return windows.cumsum(0)
    return windows[::2] if layout == "with gaps" else windows


@settings(max_examples=25, deadline=None)
@given(
    users=st.integers(3, 24),
    factor=st.floats(0.5, 3.0),
    rate=st.floats(0.02, 0.7),
    window=st.integers(2, 15),
    layout=st.sampled_from(["disjoint", "disjoint", "overlapping", "running totals", "with gaps"]),
    noise=st.sampled_from([0.0, 0.0, 1e-4, 0.3]),
    seed=st.integers(0, 10_000),
)
def test_whatever_the_federation_certified_means_right(
    users: int, factor: float, rate: float, window: int, layout: str, noise: float, seed: int
) -> None:
    planted = plant(users, max(2, round(factor * users)), rate=rate, window=window, noise=noise, seed=seed)
    windows = laid_out(layout, planted.windows)
    planted = planted._replace(windows=windows, counts=counted(windows, planted.matrix))
    with pytest.MonkeyPatch.context() as patched:  # columns that are not there are not searched for long
        patched.setattr(quick_search, "difference_map", partial(quick_search.difference_map, iterations=500))
        found = recover(planted, users=users, time_limit=0.5)
    assert found.matrix.shape == planted.matrix.shape
    assert bool(torch.isfinite(found.residual).all())
    right = right_columns(found, planted)
    certain = found.certified | torch.tensor([s in (UserStatus.GIVEN, UserStatus.INACTIVE) for s in found.statuses])
    assert not bool((certain & ~right).any())
    for user, status in enumerate(found.statuses):
        if status in USABLE:  # whatever is usable keeps the counts
            assert torch.equal(planted.windows @ found.matrix[:, user].long(), planted.counts[user])


def test_the_order_of_users_and_rounds_does_not_matter() -> None:
    planted = plant(40, 100)
    rng = torch.Generator().manual_seed(6)
    users, rounds = torch.randperm(40, generator=rng), torch.randperm(100, generator=rng)
    moved = Planted(
        planted.sums[rounds],
        planted.windows[:, rounds],
        planted.counts[users],
        planted.matrix[rounds][:, users],
        planted.updates[users],
    )
    assert torch.equal(recover(moved).matrix, moved.matrix)


# --- odd users and bad input -----------------------------------------------------------------------------------------


def test_users_who_never_or_always_took_part() -> None:
    matrix = plant(40, 110).matrix.clone()
    matrix[:, 3], matrix[:, 9] = False, True
    planted = sums_of(matrix)
    found = recover(planted, time_limit=4.0)
    assert torch.equal(found.matrix, matrix)
    assert found.statuses[3] is UserStatus.INACTIVE
    assert found.statuses[9] is UserStatus.GIVEN
    assert found.rank == 39


def test_two_users_who_always_took_part_together() -> None:
    matrix = plant(40, 110).matrix.clone()
    matrix[:, 1] = matrix[:, 0]
    planted = sums_of(matrix)
    found = recover(planted, time_limit=4.0)
    assert torch.equal(found.matrix, matrix)
    assert found.rank == 39


def test_empty_windows_and_empty_rounds() -> None:
    matrix = plant(40, 120).matrix.clone()
    matrix[20:30] = False
    matrix[77] = False
    planted = sums_of(matrix)
    empty = torch.cat([planted.windows, torch.zeros(1, 120, dtype=torch.long)])
    found = recover(planted._replace(windows=empty, counts=counted(empty, matrix)), time_limit=4.0)
    assert torch.equal(found.matrix, matrix)


def test_no_more_rounds_than_users() -> None:
    # Everyone took part, and the rank is full: without a silent user or round that leaves an equation after all.
    matrix = torch.eye(40, dtype=torch.bool) | plant(40, 40).matrix.tril(-1)
    found = recover(sums_of(matrix), users=40)
    assert found.status is ParticipationStatus.NO_REDUNDANCY
    assert UserStatus.SOLVED not in found.statuses
    assert not bool(found.certified.any())


@pytest.mark.parametrize("seed", range(4))
def test_a_silent_user_leaves_one_equation_which_proves_no_more_than_enumeration(seed: int) -> None:
    matrix = torch.eye(12, dtype=torch.bool) | plant(12, 12, rate=0.2, seed=seed).matrix.tril(-1)
    matrix[:, -1] = False
    planted = sums_of(matrix, window=6, dtype=torch.float64)
    found = recover(planted, users=12, time_limit=4.0)
    everything = torch.cartesian_prod(*[torch.tensor([False, True])] * 12)
    (equation,) = torch.linalg.svd(matrix.double()).U.T[11:]
    possible = (everything.double() @ equation).abs() < 1e-9
    for user in found.certified.nonzero()[:, 0].tolist():
        counts = everything.long() @ planted.windows.T
        (only,) = everything[possible & (counts == planted.counts[user]).all(1)]
        assert torch.equal(found.matrix[:, user], only)
    assert found.statuses[-1] is UserStatus.INACTIVE


def test_fewer_parameters_than_users() -> None:
    found = recover(plant(40, 100, parameters=20), users=40)
    assert found.status is ParticipationStatus.TOO_FEW_PARAMETERS
    assert not bool(found.certified.any())


def edit(tensor: Tensor, place: tuple[int, int], value: float) -> Tensor:
    changed = tensor.double()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p._replace(sums=edit(p.sums, (4, 2), float("nan"))), "NaN or infinity in round 4"),
        (lambda p: p._replace(counts=edit(p.counts, (5, 2), 11)), "user 5 counted 11 times in window 2 of 10 rounds"),
        (lambda p: p._replace(counts=edit(p.counts, (5, 2), 0.5)), "counts must be whole numbers"),
        (lambda p: p._replace(counts=p.counts[:, :3]), "counts must be a matrix \\(users, windows\\) for 10 windows"),
        (
            lambda p: p._replace(windows=p.windows * 2),
            "windows must be a matrix .* of zeros and ones",
        ),
        (lambda p: p._replace(windows=p.windows[:, :50]), "over 100 rounds"),
        (lambda p: p._replace(sums=p.sums[0]), "sums must have the shape \\(rounds, parameters\\)"),
        (lambda p: p._replace(sums=p.sums[:, :0]), "there are no parameters"),
    ],
)
def test_bad_input_gets_a_sentence(change: Callable[[Planted], Planted], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recover(change(plant(40, 100)))


def test_counts_that_contradict_each_other_name_user_and_window() -> None:
    planted = plant(40, 100)
    windows = torch.cat([planted.windows, torch.ones(1, 100, dtype=torch.long)])
    counts = counted(windows, planted.matrix)
    counts[6, 10] = 99
    with pytest.raises(ValueError, match=r"user 6 cannot have taken part .* in window"):
        recover(planted._replace(windows=windows, counts=counts))
    known = torch.full((100, 40), -1.0)
    known[:10, 6] = 1.0
    with pytest.raises(ValueError, match="user 6 cannot have taken part"):
        recover(planted, known=known)


def test_windows_of_very_different_lengths() -> None:
    planted = plant(40, 160)
    windows = torch.zeros(4, 160, dtype=torch.long)
    for row, (start, stop) in zip(windows, [(0, 5), (5, 20), (20, 60), (60, 160)], strict=True):
        row[start:stop] = 1
    found = recover(planted._replace(windows=windows, counts=counted(windows, planted.matrix)), time_limit=4.0)
    right = right_columns(found, planted)
    assert not bool((found.certified & ~right).any())
    assert float(right.float().mean()) > 0.5


def test_disjoint_windows_helper() -> None:
    assert disjoint_windows(5, 2).tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


class Interrupted:
    """An executor whose user loses patience after the first answer."""

    def run(self, function: Callable[[object], object], tasks: list[object]) -> Iterator[tuple[int, object]]:
        yield 0, function(tasks[0])
        raise KeyboardInterrupt


def test_an_interrupt_keeps_what_was_found() -> None:
    planted = plant(64, 128)
    whole = recover(planted, certify=False)
    found = recover(planted, executor=Interrupted(), time_limit=60.0)
    assert torch.equal(found.matrix, whole.matrix)
    assert 0.8 < float(found.certified.float().mean()) < 1


def test_a_crash_in_one_column_loses_nothing_of_the_others() -> None:
    class OneCrash:
        def run(self, function: Callable[[object], object], tasks: list[object]) -> Iterator[tuple[int, object]]:
            for index, task in enumerate(tasks):
                yield index, function(task) if index else Failure("crashed")

    planted = plant(64, 128)
    found = recover(planted, executor=OneCrash(), time_limit=60.0)
    assert torch.equal(found.matrix, planted.matrix)
    assert int(found.certified.sum()) == 63
