"""Levenberg-Marquardt beside scipy's, with bounds, in blocks and without a written-out Jacobian."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import Tensor

from fedprism.solvers import LeastSquaresStatus, levenberg_marquardt

MATRIX = torch.randn(30, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLANTED = torch.linspace(-1, 1, 12, dtype=torch.float64)


def planted(x: Tensor) -> Tensor:
    return torch.tanh(MATRIX @ x) - torch.tanh(MATRIX @ PLANTED)


def rosenbrock(x: Tensor) -> Tensor:
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def in_numpy(x: np.ndarray) -> np.ndarray:
    return rosenbrock(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("matrix_free", [False, True])
def test_a_planted_answer_is_found_to_rounding(matrix_free: bool) -> None:
    start = 0.8 * PLANTED.view(3, 4)
    answer = levenberg_marquardt(
        lambda x: planted(x.flatten()), start, matrix_free=matrix_free, tolerance=1e-24, steps=60
    )
    assert answer.status is LeastSquaresStatus.CONVERGED
    torch.testing.assert_close(answer.solution, PLANTED.view(3, 4), atol=1e-9, rtol=0)
    assert all(after <= before for before, after in zip(answer.history, answer.history[1:], strict=False))


@pytest.mark.parametrize("matrix_free", [False, True])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (-2.0, 0.5), (np.array([-2.0, -1.0]), np.array([3.0, 0.4]))])
def test_the_answer_is_that_of_scipy(matrix_free: bool, bounds: tuple[float, float]) -> None:
    begin = np.array([-1.2, 0.3])
    expected = least_squares(in_numpy, begin, bounds=bounds, xtol=1e-12, ftol=1e-12, gtol=1e-12)
    box = tuple(torch.as_tensor(bound) for bound in bounds)
    answer = levenberg_marquardt(
        rosenbrock,
        torch.from_numpy(begin),
        bounds=box,
        matrix_free=matrix_free,
        steps=200,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(answer.solution, torch.from_numpy(expected.x), atol=1e-5, rtol=0)
    assert answer.cost == pytest.approx(expected.cost, abs=1e-8)


def test_a_minimum_above_zero_is_called_stationary() -> None:
    answer = levenberg_marquardt(lambda x: torch.cat([x - 1, x + 1]), torch.full((3,), 5.0, dtype=torch.float64))
    assert answer.status is LeastSquaresStatus.STATIONARY
    assert answer.cost == pytest.approx(3.0)
    assert answer.steps < 20


def test_columns_in_blocks_give_the_same_answer() -> None:
    start = 0.5 * PLANTED
    one, other = (levenberg_marquardt(planted, start, columns=columns, steps=5) for columns in (1, 64))
    torch.testing.assert_close(one.solution, other.solution)
    assert one.normal is not None
    slopes = torch.func.jacfwd(planted)(one.solution)
    assert one.normal.shape == (12, 12)
    assert float((one.normal - slopes.T @ slopes).norm()) < 0.1 * float(one.normal.norm())


def test_a_start_without_a_finite_residual_is_returned() -> None:
    start = torch.tensor([-1.0])
    answer = levenberg_marquardt(torch.log, start)
    assert answer.status is LeastSquaresStatus.NOT_FINITE
    assert torch.equal(answer.solution, start)


def test_slow_progress_is_stopped_if_that_is_asked_for() -> None:
    def flat_valley(x: Tensor) -> Tensor:
        return torch.exp(-x)

    answer = levenberg_marquardt(flat_valley, torch.zeros(1, dtype=torch.float64), slowest=1 - 1e-12)
    assert answer.status is LeastSquaresStatus.SLOW
    assert answer.steps == 8
    assert levenberg_marquardt(flat_valley, torch.zeros(1), steps=20).steps > 8


def test_too_few_steps_are_said() -> None:
    answer = levenberg_marquardt(rosenbrock, torch.tensor([-1.2, 1.0]), steps=2)
    assert answer.status is LeastSquaresStatus.STEPS
    assert answer.steps == 2
