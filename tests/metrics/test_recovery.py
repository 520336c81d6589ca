"""Recovery rates: what counts as recovered, and Wilson's interval against his formula and by its coverage."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom, norm

from fedprism.metrics import THRESHOLD_LOOSE, THRESHOLD_STRICT, recovery_rate, wilson


def test_one_image_of_a_batch_is_enough() -> None:
    scores = torch.tensor([[0.9, 0.5], [0.7, 0.9], [0.95, 0.85], [0.61, math.nan]])
    assert recovery_rate(scores, THRESHOLD_STRICT)[3:] == (1, 4)
    assert recovery_rate(scores, THRESHOLD_LOOSE)[3:] == (3, 4)
    assert recovery_rate(scores, THRESHOLD_LOOSE).rate == 0.75


def test_the_threshold_itself_is_no_recovery() -> None:
    scores = torch.tensor([0.6, 0.5], dtype=torch.float64)
    assert recovery_rate(scores, 0.6).successes == 1


def test_no_answer_is_no_recovery_in_either_direction() -> None:
    scores = torch.tensor([math.nan, math.nan])
    assert recovery_rate(scores, 0.6).rate == 0
    assert recovery_rate(scores, 20.0, higher_is_better=True).rate == 0


def test_a_blank_image_is_to_be_beaten_too() -> None:
    scores = torch.tensor([[0.37, 0.9], [0.30, 0.9]])
    floor = torch.tensor([[0.37, 0.4], [0.37, 0.4]])
    assert recovery_rate(scores, THRESHOLD_STRICT).rate == 1
    assert recovery_rate(scores, THRESHOLD_STRICT, floor=floor).rate == 0.5


def test_decibels_are_better_when_higher() -> None:
    assert recovery_rate(torch.tensor([19.0, 21.0]), 20.0, higher_is_better=True).rate == 0.5
    floor = torch.tensor([25.0, 25.0])
    assert recovery_rate(torch.tensor([24.0, 26.0]), 20.0, floor=floor, higher_is_better=True).rate == 0.5


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 10), (5, 10), (10, 10), (0, 1), (1, 1), (37, 120)])
def test_the_interval_ends_where_wilsons_equation_holds(successes: int, trials: int) -> None:
    for end in wilson(successes, trials):
        distance = (successes / trials - end) ** 2
        assert distance == pytest.approx(norm.ppf(0.975) ** 2 * end * (1 - end) / trials, abs=1e-12)


def test_the_interval_holds_the_true_rate_about_as_often_as_it_says() -> None:
    for rate in (0.05, 0.3, 0.5):
        inside = [low <= rate <= high for low, high in (wilson(k, 20) for k in range(21))]
        assert sum(binom.pmf(k, 20, rate) for k in range(21) if inside[k]) > 0.9


def test_the_rate_lies_in_its_interval() -> None:
    found = recovery_rate(torch.tensor([0.1] * 9 + [0.9]), THRESHOLD_STRICT)
    assert (found.rate, found.successes, found.trials) == (0.9, 9, 10)
    assert 0.59 < found.low < 0.6 < 0.98 < found.high < 0.983


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (torch.zeros(0), "at least one trial"),
        (torch.zeros(2, 2, 2), "of shape \\(2, 2, 2\\)"),
        (torch.tensor([1, 2]), "not torch.int64"),
        ([0.1, 0.7], "not list. Convert them"),
    ],
)
def test_scores_that_are_none_are_refused(scores: torch.Tensor, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        recovery_rate(scores, 0.6)


def test_a_threshold_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the threshold must"):
        recovery_rate(torch.tensor([0.1]), float("nan"))


def test_a_floor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="floor must have the shape of the scores"):
        recovery_rate(torch.zeros(3), 0.6, floor=torch.zeros(2))


@pytest.mark.parametrize(("successes", "trials"), [(2, 1), (-1, 1), (0, 0)])
def test_an_impossible_count_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="must "):
        wilson(successes, trials)
