"""Federations with secure sums: their cohorts, scores user by user, and the question after a property."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedprism as fp
from fedprism_papers import Settings
from fedprism_papers.disaggregation import fig_9
from fedprism_papers.disaggregation.federation import FirstUsers, cohorts, score_users
from fedprism_papers.shared.measuring import ANSWERED, OVER_40_DB

USERS, ROUNDS = 12, 60


@pytest.fixture(scope="module")
def scenario(digits: fp.data.ImageSet) -> fp.Scenario:
    return fp.Scenario(
        model=fp.models.build("fc2", input_shape=(1, 16, 16), hidden=16, classes=10, seed=0),
        clients=[digits.batch([2 * user, 2 * user + 1]) for user in range(USERS)],
        aggregation="sum",
        rounds=ROUNDS,
        participation=0.3,
        frozen=True,
        window=10,
    )


def test_cohorts_have_one_size_and_change(rng: torch.Generator) -> None:
    drawn = cohorts(10, 3, 200, rng)
    assert drawn.sum(1).tolist() == [3] * 200
    assert bool(((drawn.sum(0) > 35) & (drawn.sum(0) < 85)).all())
    assert len(drawn.unique(dim=0)) > 50


def test_images_count_only_with_their_owner(scenario: fp.Scenario) -> None:
    _, truth = fp.simulate(scenario, fp.threats.secure_aggregation, seed=1)
    right = fp.Reconstruction(inputs=truth.inputs, owners=truth.owners, ambiguity=frozenset({"order"}))
    swapped = dataclasses.replace(right, owners=tuple(reversed(truth.owners)))
    settings = Settings(quick=True)
    good, pictures, _ = score_users(right, truth, settings, 3)
    bad, *_ = score_users(swapped, truth, settings, 3)
    assert (good[OVER_40_DB], good[ANSWERED]) == (1.0, 1.0)
    assert bad[OVER_40_DB] == 0.0
    assert bad[ANSWERED] == 1.0
    assert len(pictures["originals"]) == len(pictures["recovered"]) == 6
    assert score_users(fp.Reconstruction(owners=()), truth, settings, 3) == ({OVER_40_DB: 0.0, ANSWERED: 0.0}, {}, 0.0)


def test_only_the_first_users_are_handed_on(scenario: fp.Scenario) -> None:
    knows_who = fp.threats.secure_aggregation.granting("participation").withholding("counts", "windows")
    observation, _ = fp.simulate(scenario, knows_who, seed=1)
    parts = FirstUsers(users=3).explained(observation).parts
    assert [part.subject for part in parts] == ["client-0", "client-1", "client-2"]


def test_both_kinds_count_for_half_of_the_accuracy() -> None:
    marks = torch.tensor([True, False, False, False, False])
    assert fig_9.balanced(marks, torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4])) == 1.0
    assert fig_9.balanced(marks, torch.zeros(5)) == 0.5
