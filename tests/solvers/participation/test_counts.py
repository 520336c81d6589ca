"""Counts under noise: they name users and never cost a column that comes back without them."""

from __future__ import annotations

import pytest
import torch

from fedprism.defenses import (
    BlurredCounts,
    CountRelease,
    GeometricCounts,
    LaplaceCounts,
    NormalCounts,
    RoundedCounts,
)
from fedprism.solvers import ParticipationStatus, UserStatus, recover_participation
from planting import plant


@pytest.mark.parametrize(
    ("release", "least"),
    [
        (LaplaceCounts(1.0), 0.7),
        (GeometricCounts(1.0), 0.9),
        (NormalCounts(1.0), 0.95),
        (BlurredCounts(2), 0.9),
        (RoundedCounts(5), 0.6),
        (LaplaceCounts(0.1), 0.0),
    ],
    ids=repr,
)
def test_no_column_is_lost_and_no_name_is_wrong(release: CountRelease, least: float) -> None:
    planted = plant(50, 300)
    reported = release.release(planted.counts, planted.windows.sum(1), torch.Generator().manual_seed(1))
    found = recover_participation(
        planted.sums, planted.windows, reported, count_likelihood=release.log_likelihood, certify=False
    )
    assert {tuple(c) for c in found.matrix.T.tolist()} == {tuple(c) for c in planted.matrix.T.tolist()}
    named = torch.tensor([status is UserStatus.SOLVED for status in found.statuses])
    right = (found.matrix == planted.matrix).all(0)
    assert bool((right | ~named).all())
    assert float(named.float().mean()) >= least
    assert set(found.statuses) <= {UserStatus.SOLVED, UserStatus.UNNAMED}
    assert (found.status is ParticipationStatus.COMPLETE) == bool(named.all())


@pytest.mark.parametrize("seed", range(3))
def test_counts_under_noise_cost_no_column_that_comes_back_without_them(seed: int) -> None:
    release = LaplaceCounts(1.0)
    planted = plant(30, 84, seed=seed)  # so few rounds that without counts not all columns are found
    rng = torch.Generator().manual_seed(seed)
    reported = release.release(planted.counts, planted.windows.sum(1), rng)
    without = recover_participation(planted.sums)
    found = recover_participation(planted.sums, planted.windows, reported, count_likelihood=release.log_likelihood)
    true = {tuple(column) for column in planted.matrix.T.tolist()}
    counts = []
    for answer in (without, found):
        called = [
            tuple(column)
            for column, status in zip(answer.matrix.T.tolist(), answer.statuses, strict=True)
            if status in (UserStatus.SOLVED, UserStatus.UNNAMED)
        ]
        assert set(called) <= true
        counts.append(len(called))
    assert counts[1] >= counts[0]
    for user in (found.matrix != planted.matrix).any(0).nonzero()[:, 0].tolist():
        assert found.statuses[user] is not UserStatus.SOLVED


def test_some_reports_may_be_missing() -> None:
    release = LaplaceCounts(1.0)
    planted = plant(40, 300)
    rng = torch.Generator().manual_seed(1)
    reported = release.release(planted.counts, planted.windows.sum(1), rng)
    reported[torch.rand(reported.shape, generator=rng) < 0.5] = torch.nan
    found = recover_participation(planted.sums, planted.windows, reported, count_likelihood=release.log_likelihood)
    named = torch.tensor([status is UserStatus.SOLVED for status in found.statuses])
    assert bool(named.any())
    assert bool((found.matrix == planted.matrix).all(0)[named].all())


def test_a_wrong_count_makes_no_wrong_column() -> None:
    planted = plant(30, 120)
    counts = planted.counts.clone()
    counts[0, 0] += 1
    counts[0, 1] = (counts[0, 1] + 1) % 5
    found = recover_participation(planted.sums, planted.windows, counts, certify=False, time_limit=0.1)
    assert found.statuses[0] in (UserStatus.UNSOLVED, UserStatus.UNCERTAIN)
    assert torch.equal(found.matrix[:, 1:], planted.matrix[:, 1:])
