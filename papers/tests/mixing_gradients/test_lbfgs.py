"""L-BFGS on many problems at once: the same steps as torch.optim.LBFGS on each alone, and no problem sees another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism_papers.mixing_gradients.lbfgs import BatchedLBFGS

PROBLEMS, SIZE = 5, 12
STIFFNESS = torch.linspace(1, 9, PROBLEMS, dtype=torch.float64)


def valleys(points: Tensor, stiffness: Tensor) -> Tensor:
    """Curved valleys (Rosenbrock's), each of another stiffness; the minimum is 0, at ones."""
    steep = (points[..., 1:] - points[..., :-1].square()).square().sum(-1)
    return stiffness * steep + (1 - points[..., :-1]).square().sum(-1)


def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
    points = points.detach().requires_grad_()
    values = valleys(points, STIFFNESS[: len(points)].to(points.dtype))
    return values.detach(), torch.autograd.grad(values.sum(), points)[0]


def starts(dtype: torch.dtype = torch.float64) -> Tensor:
    """Not so far from the valleys that a step without line search leaves them: then rounding would decide."""
    drawn = torch.randn(PROBLEMS, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (0.5 + 0.2 * drawn).to(dtype)


def alone(start: Tensor, stiffness: Tensor, steps: int, lr: float, history: int) -> Tensor:
    point = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [point],
        lr=lr,
        max_iter=steps,
        max_eval=10 * steps,
        history_size=history,
        tolerance_grad=0,
        tolerance_change=0,
    )

    def closure() -> Tensor:
        value = valleys(point, stiffness.to(point.dtype))
        (point.grad,) = torch.autograd.grad(value, point)
        return value

    optimizer.step(closure)
    return point.detach()


def after(descent: BatchedLBFGS, steps: int) -> BatchedLBFGS:
    for _ in range(steps):
        descent.step()
    return descent


@pytest.mark.parametrize(
    ("lr", "history", "steps", "dtype", "tolerance"),
    [
        (0.05, 100, 70, torch.float64, 1e-7),
        (0.05, 10, 100, torch.float64, 1e-7),
        (0.5, 5, 40, torch.float64, 1e-7),
        (0.5, 5, 20, torch.float32, 1e-3),
    ],
)
def test_each_problem_takes_the_steps_it_takes_alone(
    lr: float, history: int, steps: int, dtype: torch.dtype, tolerance: float
) -> None:
    """In most cases there are more steps than pairs are remembered, so that the memory goes round."""
    together = after(BatchedLBFGS(evaluate, starts(dtype), lr=lr, history=history), steps)
    for number, start in enumerate(starts(dtype)):
        expected = alone(start, STIFFNESS[number], steps, lr, history)
        torch.testing.assert_close(together.point[number], expected, rtol=tolerance, atol=tolerance)


def test_the_minimum_is_found() -> None:
    descent = after(BatchedLBFGS(evaluate, starts(), lr=0.5), 200)
    assert float(descent.best_value.max()) < 1e-10
    torch.testing.assert_close(descent.best, torch.ones(PROBLEMS, SIZE, dtype=torch.float64), atol=1e-4, rtol=0)
    assert bool(descent.active.all())


def test_a_problem_does_not_depend_on_its_neighbours() -> None:
    all_of_them = after(BatchedLBFGS(evaluate, starts(), lr=0.3), 40)
    few = after(BatchedLBFGS(evaluate, starts()[:2], lr=0.3), 40)
    torch.testing.assert_close(all_of_them.point[:2], few.point, rtol=1e-9, atol=1e-9)


def test_numbers_that_are_not_finite_stay_with_their_problem() -> None:
    """One problem starts at NaN, one runs into a wall of NaN, one into infinite gradients: the others do not notice."""

    def dangerous(points: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = evaluate(points)
        walled = torch.arange(len(points)) == 1
        beyond = walled & (points.mean(1) > 0.3)
        steep = (torch.arange(len(points)) == 3) & (points.mean(1) > 0.3)
        values = torch.where(beyond, torch.nan, values)
        return values, torch.where(steep.unsqueeze(1), torch.inf, gradients)

    start = starts()
    start[0] = torch.nan
    start[1] = start[3] = 0.0
    descent = after(BatchedLBFGS(dangerous, start, lr=0.3), 60)
    assert descent.strayed.tolist() == [True, True, False, True, False]
    assert float(descent.best_value[0]) == float("inf")
    assert bool(descent.best_value[[1, 3]].isfinite().all())
    assert float(descent.best[1].mean()) <= 0.3
    undisturbed = after(BatchedLBFGS(evaluate, starts(), lr=0.3), 60)
    torch.testing.assert_close(descent.point[[2, 4]], undisturbed.point[[2, 4]], rtol=1e-9, atol=1e-9)
    assert bool(descent.point[1:].isfinite().all())


def test_a_direction_uphill_is_forgotten() -> None:
    """What rounding can do to the memory of one problem costs it that memory, not the descent."""
    descent = BatchedLBFGS(evaluate, starts(), lr=0.5)
    after(descent, 10)
    descent._scale[2] = -1e6
    after(descent, 1)
    assert descent._used.any(1).tolist() == [True] * PROBLEMS  # the step just taken is remembered again
    assert int(descent._used[2].sum()) == 1
    after(descent, 150)
    assert float(descent.best_value.max()) < 1e-8


def test_a_problem_that_is_good_enough_stands_still() -> None:
    descent = after(BatchedLBFGS(evaluate, starts(), lr=0.5, tolerance=1e-3), 300)
    assert bool(descent.reached.all())
    here = descent.point.clone()
    after(descent, 5)
    torch.testing.assert_close(descent.point, here, rtol=0, atol=0)
    assert bool((descent.best_value < 1e-3).all())
    assert float(descent.best_value.max()) > 1e-12  # it did stop
