"""Doubt between two updates against simulated noise, and confidence limits against how often they hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from fedprism.solvers.bounds.overlap import exact_doubt, gaussian_doubt, laplace_doubt, lower_mean

DRAWS = 200_000


def simulated_doubt(
    noise: torch.Tensor, log_density: Callable[[torch.Tensor], torch.Tensor], difference: torch.Tensor
) -> float:
    """4 E[p (1 - p)] by drawing the noise, for updates at 0 and at `difference`."""
    odds = (log_density(noise) - log_density(noise - difference)).sum(1)
    posterior = torch.sigmoid(odds)
    return float(4 * (posterior * (1 - posterior)).mean())


@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0, 4.0])
def test_gaussian_doubt_is_what_noise_leaves(distance: float) -> None:
    rng = torch.Generator().manual_seed(1)
    difference = torch.tensor([distance * 0.6, distance * 0.8], dtype=torch.float64)
    noise = torch.randn(DRAWS, 2, generator=rng, dtype=torch.float64)
    expected = simulated_doubt(noise, lambda x: -x.square() / 2, difference)
    assert gaussian_doubt(distance) == pytest.approx(expected, abs=4e-3)


@pytest.mark.parametrize("apart", [0.0, 0.3, 1.0, 3.0])
def test_laplace_doubt_is_never_above_what_noise_leaves_and_close(apart: float) -> None:
    rng = torch.Generator().manual_seed(2)
    difference = torch.tensor([apart, apart / 2, 0.0], dtype=torch.float64)
    uniform = torch.rand(2, DRAWS, 3, generator=rng, dtype=torch.float64)
    noise = (uniform[0].log() - uniform[1].log()) / math.sqrt(2)
    expected = simulated_doubt(noise, lambda x: -x.abs() * math.sqrt(2), difference)
    assert expected * 0.6 - 0.01 <= laplace_doubt(difference) <= expected + 4e-3


def test_doubt_falls_from_one_to_zero() -> None:
    values = [gaussian_doubt(distance / 4) for distance in range(100)]
    assert values[0] == 1
    assert values[-1] == 0
    assert all(first >= second for first, second in itertools.pairwise(values))
    assert exact_doubt(torch.zeros(3)) == 1
    assert exact_doubt(torch.tensor([0.0, 1e-30])) == 0


@pytest.mark.parametrize("chance", [0.03, 0.5, 0.9])
def test_the_mean_exceeds_its_lower_limit_as_often_as_promised(chance: float) -> None:
    rng = torch.Generator().manual_seed(3)
    for spread in (False, True):  # values of 0 and 1, and values between that have the same mean
        drawn = (torch.rand(400, 40, generator=rng) < chance).double()
        if spread:
            drawn = (drawn + chance) / 2
        held = sum(lower_mean(values, 0.9) <= chance for values in drawn) / 400
        assert held >= 0.9


def test_the_limit_is_not_idle() -> None:
    assert 0.85 < lower_mean(torch.ones(40), 0.95) < 0.93  # Clopper and Pearson: 0.928
    assert 0.25 < lower_mean(torch.tensor([0.0, 1.0] * 20), 0.95) < 0.361  # theirs: 0.361
    assert lower_mean(torch.zeros(40), 0.95) == 0
