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
        (LaplaceCounts(1.0), 0.95),
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


def test_counts_under_noise_make_up_for_rounds() -> None:
    release = LaplaceCounts(1.0)
    planted = plant(60, 132)
    reported = release.release(planted.counts, planted.windows.sum(1), torch.Generator().manual_seed(1))
    without = recover_participation(planted.sums)
    found = recover_participation(planted.sums, planted.windows, reported, count_likelihood=release.log_likelihood)
    true = {tuple(c) for c in planted.matrix.T.tolist()}
    right = [sum(tuple(c) in true for c in answer.matrix.T.tolist()) for answer in (without, found)]
    assert right[1] >= right[0]
    wrong = (found.matrix != planted.matrix).any(0)
    assert not any(found.statuses[user] is UserStatus.SOLVED for user in wrong.nonzero()[:, 0].tolist())


def test_some_reports_may_be_missing() -> None:
    release = LaplaceCounts(1.0)
    planted = plant(40, 300)
    rng = torch.Generator().manual_seed(1)
    reported = release.release(planted.counts, planted.windows.sum(1), rng)
    reported[torch.rand(reported.shape, generator=rng) < 0.5] = torch.nan
    found = recover_participation(planted.sums, planted.windows, reported, count_likelihood=release.log_likelihood)
    named = torch.tensor([status is UserStatus.SOLVED for status in found.statuses])
    assert float(named.float().mean()) > 0.5
    assert bool((found.matrix == planted.matrix).all(0)[named].all())
