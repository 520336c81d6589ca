"""Words for numbers: planted figures on both sides of every limit."""

from __future__ import annotations

import math

import pytest

from fedprism.evaluation.severity import Figure, Leak, readable, severity, worst


def figure(closest: float, null: float | None = None, mean: float | None = None) -> Figure:
    return Figure(mean=closest if mean is None else mean, low=None, high=None, closest=closest, baseline=null)


@pytest.mark.parametrize(
    ("metric", "closest", "null", "leak"),
    [
        ("psnr", 30.0, 13.0, Leak.FAITHFUL),
        ("psnr", math.inf, 13.0, Leak.FAITHFUL),
        ("psnr", 29.9, 13.0, Leak.TRACES),
        ("psnr", 12.0, 13.0, Leak.GONE),
        ("psnr", 31.0, 32.0, Leak.GONE),
        ("mse", 1e-3, 0.1, Leak.FAITHFUL),
        ("ssim", 0.5, 0.2, Leak.RECOGNISABLE),
        ("ssim", 0.49, 0.2, Leak.TRACES),
        ("ssim", 0.5, 0.45, Leak.TRACES),
        ("columns", 1.0, 0.5, Leak.FAITHFUL),
        ("columns", 0.8, 0.5, Leak.RECOGNISABLE),
        ("columns", 0.8, 0.75, Leak.TRACES),
        ("update-error", 0.01, None, Leak.FAITHFUL),
        ("update-error", 0.1, None, Leak.RECOGNISABLE),
        ("update-error", 0.5, None, Leak.TRACES),
        ("update-error", 0.6, None, Leak.GONE),
        ("avd_floor", 0.0, None, Leak.GONE),
    ],
)
def test_a_word_follows_the_closest_sample(metric: str, closest: float, null: float | None, leak: Leak) -> None:
    assert severity({metric: figure(closest, null)}, all_answered=True) is leak


def test_means_count_only_where_every_sample_was_answered() -> None:
    better_on_average = {"psnr": figure(15.0, 13.0)}
    assert severity(better_on_average, all_answered=True) is Leak.TRACES
    assert severity(better_on_average, all_answered=False) is Leak.GONE


def test_one_bad_leak_outweighs_many_harmless_ones() -> None:
    assert worst([Leak.GONE, Leak.RECOGNISABLE, Leak.TRACES]) is Leak.RECOGNISABLE
    assert worst([]) is Leak.UNTESTED


@pytest.mark.parametrize(
    ("scores", "recovered"),
    [
        ({"psnr": 31.0}, True),
        ({"psnr": 29.0}, False),
        ({"psnr": 29.0, "ssim": 0.55}, True),
        ({"ssim": 0.55}, True),
        ({"ssim": 0.3}, False),
        ({"avd_floor": 0.0}, False),
        ({}, False),
    ],
)
def test_one_sample_is_judged_by_its_own_scores(scores: dict[str, float], recovered: bool) -> None:
    """The closest of all samples does not make the others recovered."""
    metrics = {"psnr": figure(50.0, null=13.0), "ssim": figure(0.9, null=0.1), "avd_floor": figure(0.2, null=0.3)}
    assert readable(scores, metrics) is recovered


def test_a_sample_that_a_guess_reaches_is_not_recovered() -> None:
    assert not readable({"psnr": 35.0}, {"psnr": figure(50.0, null=36.0)})
