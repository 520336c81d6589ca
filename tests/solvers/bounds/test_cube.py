"""Hypercubes where the best possible attacker is known: a linear update, and updates that say nothing or all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedprism.solvers.bounds.cube import Basis, certify
from fedprism.solvers.bounds.natural import natural_prior
from fedprism.solvers.bounds.overlap import gaussian_doubt
from fedprism.solvers.bounds.search import (
    Effort,
    Prior,
    information_about,
    linearised_error,
    posterior,
    prior_cube,
    tightest,
)

SIZE = 6
THOROUGH = Effort(tried=8, certified=200, adapts=True)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apart(difference: Tensor) -> float:
    return gaussian_doubt(float(difference.norm()))


def small_prior(deviation: float = 0.1) -> Prior:
    return Prior(Basis((torch.eye(SIZE),)), torch.full((SIZE,), deviation**2))


def test_the_best_attacker_on_a_small_cube_does_no_better_than_the_bound() -> None:
    # The posterior mean over all 64 vertices is the best estimate there is.
    matrix = torch.randn(10, SIZE, generator=rng(1), dtype=torch.float64) * 8
    cube = prior_cube(torch.full((SIZE,), 0.5), small_prior())
    bound = certify(cube, lambda x: matrix @ x.double(), apart, pairs=400, confidence=0.95, rng=rng(2))
    vertices = torch.stack([cube.vertex(torch.tensor(signs)) for signs in itertools.product((-1.0, 1.0), repeat=SIZE)])
    updates = vertices.double() @ matrix.T
    truth = torch.randint(len(vertices), (4000,), generator=rng(3))
    observed = updates[truth] + torch.randn(4000, 10, generator=rng(4), dtype=torch.float64)
    weights = torch.softmax(-torch.cdist(observed, updates).square() / 2, 1)
    best = float((weights @ vertices.double() - vertices[truth].double()).square().mean())
    assert 0.1 * best < bound.error <= best


def test_vertices_stay_within_bounds_and_cut_steps_count_less() -> None:
    cube = prior_cube(torch.tensor([0.0, 0.5, 1.0, 0.02, 0.5, 0.5]), small_prior())
    drawn = torch.stack([cube.draw(rng(seed)) for seed in range(50)])
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1
    blind = certify(cube, lambda x: torch.zeros(1), apart, pairs=600, confidence=0.95, rng=rng())
    error = float((drawn - drawn.mean(0)).square().mean())
    assert 0.7 * error < blind.error <= error * 1.05
    assert blind.error < 0.9 * cube.blind_error


def test_an_update_that_tells_all_gives_no_bound_and_one_that_tells_nothing_the_prior() -> None:
    center, prior = torch.full((SIZE,), 0.5), small_prior()
    effort = Effort(tried=4, certified=60, adapts=False)
    tell_all = tightest(
        center, prior, lambda x: x, lambda d: float(not d.any()), effort=effort, confidence=0.95, rng=rng()
    )
    assert tell_all.error == 0
    assert tell_all.witness is None
    nothing = tightest(
        center, prior, lambda x: 0 * x, lambda d: float(not d.any()), effort=effort, confidence=0.95,
        rng=rng(),
    )  # fmt: skip
    assert nothing.error == pytest.approx(0.01, rel=0.1)
    assert nothing.witness is not None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [1e-3, 0.03, 1.0])
def test_adapted_directions_come_close_to_the_best_linear_estimate(seed: int, noise: float) -> None:
    # Ill-conditioned, and along no direction of the prior: fixed directions lose 20 decibels here.
    mixed = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=rng(seed), dtype=torch.float64))[0]
    matrix = mixed @ torch.diag(torch.logspace(-2, 1, SIZE, dtype=torch.float64)) @ mixed.T / noise
    center, prior = torch.full((SIZE,), 0.5), small_prior()

    def signal(x: Tensor) -> Tensor:
        return matrix @ x.double()

    bound = tightest(
        center, prior, signal, apart, effort=THOROUGH, confidence=0.95, rng=rng(seed)
    )  # fmt: skip
    estimate = linearised_error(center, prior, signal)
    assert estimate / 4 < bound.error <= 1.02 * estimate


def test_the_cube_is_no_wider_than_the_prior() -> None:
    matrix = torch.randn(9, SIZE, generator=rng(5), dtype=torch.float64)
    center, prior = torch.full((SIZE,), 0.5), small_prior()
    left_open = posterior(prior, information_about(center, prior, lambda x: matrix @ x.double(), 0.1))
    (axes,) = left_open.basis.factors
    covariance = axes.T @ torch.diag(left_open.variances) @ axes
    torch.testing.assert_close(axes @ axes.T, torch.eye(SIZE), atol=1e-5, rtol=0)
    expected = torch.linalg.inv(matrix.T @ matrix + 100 * torch.eye(SIZE, dtype=torch.float64))
    torch.testing.assert_close(covariance.double(), expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 5), (2, 4, 4), (5,), (1, 40)])
def test_the_natural_prior_is_orthonormal_and_has_the_stated_variance(shape: tuple[int, ...]) -> None:
    prior, sentence = natural_prior(shape)
    size = torch.Size(shape).numel()
    directions = torch.stack([prior.basis.direction(number) for number in range(size)])
    torch.testing.assert_close(directions @ directions.T, torch.eye(size), atol=1e-5, rtol=0)
    assert float(prior.variances.mean()) == pytest.approx(0.0625 if len(shape) == 3 else 1 / 12, rel=1e-4)
    assert ("images" in sentence) == (len(shape) == 3)
    weights = torch.randn(size, generator=rng())
    torch.testing.assert_close(prior.basis.combine(weights), weights @ directions, atol=1e-5, rtol=1e-4)
