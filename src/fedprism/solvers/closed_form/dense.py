"""Inputs out of the gradient of a dense layer, in closed form.

For o = W x + b the gradient of a row is gW_j = mean_m d_j^m x^m and gb_j = mean_m d_j^m, where d = dl/do. So
gW_j / gb_j is the input of a single sample exactly, and of a batch wherever one sample dominates the row.

Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", 2018 (the division);
Eloul et al., "Enhancing Privacy against Inversion Attacks in Federated Learning by using Mixing Gradients Strategies",
2022 (batches, per-class mixing).

Differs from the papers in: the row of an absent class is subtracted first, which removes what all rows share; and where
the layer's weights are known, `solve_output_layer` removes the rest of the mixing, so that a batch with distinct labels
comes out exactly.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedprism.solvers.separation.mixture import effective_rank

PATIENCE = 20
"""Iterations without clear progress after which `solve_output_layer` stops."""
PROGRESS = 0.9
"""Factor by which the residual must fall for clear progress."""
SMALLEST_DIVISOR = 1e-12
"""Bias gradient, relative to the largest, that a row is divided by at least."""
OUTVOTING_STEPS = 20
"""Steps of reweighting."""
SAME_SIZE = 0.01
"""Relative difference up to which rows have one size: far above rounding, far below the spread of errors."""
LEAST_AGREEING = 2
"""Rows that mix several samples practically never do so in the same proportion: so many agree on single ones only."""


class DenseStatus(StrEnum):
    EXACT = "the update recomputed from the inputs points along the observed one to rounding error"
    LAYER = (
        "the inputs explain the gradient of the layer they feed to rounding error; whether they explain the rest of "
        "the update could not be checked"
    )
    ELSEWHERE = (
        "the inputs explain the gradient of the layer they feed to rounding error, but the update recomputed from them "
        "as one gradient step is not the observed one"
    )
    UNCHECKABLE = "the update holds too few numbers to check the inputs: some inputs would fit any update"
    ROWS = "each invertible row is the gradient-weighted mean of the samples that pass through it"
    AGREED = "each input is confirmed by at least two rows that agree on it"
    UNCONFIRMED = (
        "rows agree on each input, or the inputs explain the layer they feed, which confirms them only if clients sent "
        "gradients or trained with SGD: their optimizer is not known"
    )
    SIGNS = "the entries of the layer's update have one size, as if only signs were sent: its rows show no input"
    BLENDED = "some classes hold several samples; their rows are averages of these"
    RESIDUAL = "the inputs explain only part of the gradient: they are approximate, or not the client's"
    UNDETERMINED = "the gradient distinguishes fewer samples than there may be: other inputs would explain it as well"
    NOT_INVERTIBLE = "no row has a bias gradient to divide by"


class DenseInversion(NamedTuple):
    inputs: Tensor
    """(rows, features): one estimate for each invertible row."""
    rows: Tensor
    """(rows,) which rows of the layer these are."""
    status: DenseStatus


class OutputLayerSolution(NamedTuple):
    inputs: Tensor
    """(samples, features)"""
    signals: Tensor
    """(samples, classes): each sample's share of dL/do, (softmax - one-hot) / batch size."""
    residual: float
    """The sine of the angle between the gradient these inputs would give and the observed one."""
    status: DenseStatus


def invert_dense(
    weight_grad: Tensor, bias_grad: Tensor, *, reference: int | None = None, floor: float = 1e-6
) -> DenseInversion:
    """Divide each row of the weight gradient (rows, features) by its bias gradient (rows,).

    `reference`: a row to subtract first (an absent class). `floor`: smallest divisor, relative to the largest.
    """
    weight_grad, bias_grad = weight_grad.double(), bias_grad.double()
    if reference is not None:
        weight_grad, bias_grad = weight_grad - weight_grad[reference], bias_grad - bias_grad[reference]
    size = bias_grad.abs()
    rows = ((size > floor * size.max()) & (size > 0)).nonzero().flatten()
    inputs = weight_grad[rows] / bias_grad[rows].unsqueeze(1)
    return DenseInversion(inputs, rows, DenseStatus.ROWS if len(rows) else DenseStatus.NOT_INVERTIBLE)


def invert_single(weight_grad: Tensor, bias_grad: Tensor) -> Tensor:
    """The input (features,) behind the gradient of one sample, from all rows at once by least squares."""
    weight_grad, bias_grad = weight_grad.double(), bias_grad.double()
    return weight_grad.T @ bias_grad / bias_grad.square().sum()


def numerical_rank(weight_grad: Tensor, bias_grad: Tensor) -> int:
    """How many independent samples stand behind a layer's gradient; a lower bound of the batch size."""
    both = torch.cat([weight_grad, bias_grad.unsqueeze(1)], dim=1)
    return effective_rank(torch.linalg.svdvals(both.double()), both.shape, both.dtype)[0]


def absent_class(bias_grad: Tensor, present: Tensor) -> int | None:
    """The absent class with the most typical bias gradient, or None where every class is present."""
    absent = torch.ones(len(bias_grad), dtype=torch.bool, device=bias_grad.device)
    absent[present] = False
    candidates = absent.nonzero().flatten()
    if len(candidates) == 0:
        return None
    return int(candidates[bias_grad[candidates].argsort()[len(candidates) // 2]])


def solve_output_layer(
    weight: Tensor, bias: Tensor, weight_grad: Tensor, bias_grad: Tensor, counts: Tensor, *, iterations: int = 500
) -> OutputLayerSolution:
    """The inputs of the last dense layer under softmax cross-entropy, one for each class present.

    Solves s [gW | gb] = Rᵀ[Z | 1], R = counts (softmax(Z Wᵀ + b) - one-hot) / batch size, for Z, by turns: given R,
    Z is a least-squares solution in the row space of [gW | gb]; given Z, R follows. The scale s need not be known: it
    is what makes the last column of [Z | 1] one. counts (classes,): how often each class occurs.
    """
    gradient = torch.cat([weight_grad, bias_grad.unsqueeze(1)], dim=1).double()
    affine = torch.cat([weight, bias.unsqueeze(1)], dim=1).double()
    counts = counts.to(gradient.device)
    classes = counts.nonzero().flatten()
    weights = counts[classes].double() / counts.sum()
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    size = min(len(classes), len(values))
    left, basis = left[:, :size] * values[:size], right[:size]
    logits_of = basis @ affine.T
    targets = one_hot(classes, len(counts)).double()

    def signals(solution: Tensor) -> Tensor:
        return (torch.softmax(solution @ logits_of, dim=1) - targets) * weights.unsqueeze(1)

    solution = _first_guess(left, basis, gradient[:, -1], classes)
    best, best_residual, best_at = solution, float("inf"), 0
    for iteration in range(iterations):
        current = signals(solution)
        fitted = current.T @ solution
        apart = torch.linalg.vector_norm(current.T @ (1 - solution @ basis[:, -1])) / torch.linalg.vector_norm(fitted)
        residual = math.hypot(_misfit(fitted, left), float(apart))
        if residual < PROGRESS * best_residual:
            best_at = iteration
        if residual < best_residual:
            best, best_residual = solution, residual
        if not math.isfinite(residual) or iteration - best_at >= PATIENCE:
            break
        solution = least_squares(current.T, left)
        solution = _with_ones(solution, solution @ basis[:, -1])
    best_signals = signals(best)
    # What more inputs would explain, too: else the fewest classes always explained most.
    best_residual = math.hypot(best_residual, float(values[size:].norm() / values.norm()))
    status = DenseStatus.EXACT if explains(best_residual, weight.dtype) else DenseStatus.RESIDUAL
    # Where every class is present the signals add up to zero, and a mixture of samples cancels out. What a sample adds
    # may also be less than rounding error.
    rtol = tolerance(weight.dtype)
    if status is DenseStatus.EXACT and int(torch.linalg.matrix_rank(best_signals, rtol=rtol)) < len(best_signals):
        status = DenseStatus.UNDETERMINED
    if bool((counts > 1).any()):
        status = DenseStatus.BLENDED
    return OutputLayerSolution((best @ basis)[:, :-1], best_signals, best_residual, status)


def explains(residual: float, dtype: torch.dtype) -> bool:
    """Whether a relative residual is what rounding alone leaves of a gradient given in this precision."""
    return residual < tolerance(dtype)


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative residual that counts as rounding in this precision: half of the digits."""
    return math.sqrt(torch.finfo(dtype).eps)


def _first_guess(left: Tensor, basis: Tensor, bias_grad: Tensor, classes: Tensor) -> Tensor:
    """Row division in the coordinates of `basis`, less the row of an absent class where there is one."""
    reference = absent_class(bias_grad, classes)
    rows, divisor = left[classes], bias_grad[classes]
    if reference is not None:
        rows, divisor = left[reference] - rows, bias_grad[reference] - divisor
    tiny = SMALLEST_DIVISOR * bias_grad.abs().max()
    divisor = torch.where(divisor.abs() > tiny, divisor, tiny)
    return rows / divisor.unsqueeze(1)


def least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """The smallest solution of min |matrix x - right|, repeatable to the last bit; NaN for infinite ones."""
    if not bool(torch.isfinite(matrix).all()):
        return right.new_full((matrix.shape[1], right.shape[1]), torch.nan)
    # torch.linalg.lstsq is not repeatable with every torch on the CPU, and expects full rank on the GPU.
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = values > max(matrix.shape) * torch.finfo(matrix.dtype).eps * values[0]
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)
    solution: Tensor = vh.T @ (inverse.unsqueeze(1) * (u.T @ right))
    return solution


def back_substitute(signals: Tensor, weight_grad: Tensor, bias_grad: Tensor) -> tuple[Tensor, float]:
    """The inputs Z (samples, features) in s [gW | gb] = signalsᵀ [Z | 1], signals (samples, rows), and the residual."""
    gradient = torch.cat([weight_grad, bias_grad.unsqueeze(1)], dim=1).double()
    solution = least_squares(signals.T, gradient)
    inputs = _with_ones(solution[:, :-1], solution[:, -1])
    return inputs, _misfit(signals.T @ torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1), gradient)


def outside(inputs: Tensor, weight_grad: Tensor, bias_grad: Tensor) -> float:
    """The share of a layer's gradient (rows, features) that is no combination of these inputs (samples, features)."""
    gradient = torch.cat([weight_grad, bias_grad.unsqueeze(1)], dim=1).double()
    fed = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1).double()
    return _misfit(least_squares(fed.T, gradient.T).T @ fed, gradient)


def outvote(signals: Tensor, weight_grad: Tensor, bias_grad: Tensor) -> Tensor:
    """As `back_substitute` where a few rows have wrong signals: least absolute deviations, by reweighting."""
    gradient = torch.cat([weight_grad, bias_grad.unsqueeze(1)], dim=1).double()
    weights = torch.ones_like(gradient[:, :1])
    for _ in range(OUTVOTING_STEPS):
        solution = least_squares(weights * signals.T, weights * gradient)
        misfits = torch.linalg.vector_norm(signals.T @ solution - gradient, dim=1, keepdim=True)
        weights = misfits.clamp(min=torch.finfo(misfits.dtype).eps * misfits.max()).rsqrt().nan_to_num()
    return _with_ones(solution[:, :-1], solution[:, -1])


def _with_ones(inputs: Tensor, ones: Tensor) -> Tensor:
    """Inputs in the scale, which the gradient does not tell, in which what stands for ones comes closest to them."""
    return inputs * scale_of(torch.ones_like(ones), ones)


def scale_of(fitted: Tensor, gradient: Tensor) -> float:
    """What a gradient has to be multiplied by to be the fitted one, by least squares."""
    return float((fitted * gradient).sum() / gradient.square().sum())


def _misfit(fitted: Tensor, gradient: Tensor) -> float:
    """The sine of the angle between two matrices, each taken as one vector."""
    missed = gradient - fitted * ((fitted * gradient).sum() / fitted.square().sum())
    return float(torch.linalg.vector_norm(missed) / torch.linalg.vector_norm(gradient))


def differ_in_size(values: Tensor) -> bool:
    """Whether the largest and the smallest magnitude differ by more than SAME_SIZE."""
    sizes = values.abs()
    return len(sizes) > 1 and float(sizes.min()) < (1 - SAME_SIZE) * float(sizes.max())


def agreeing_rows(inversion: DenseInversion, bias_grad: Tensor, *, tolerance: float = 1e-4) -> DenseInversion:
    """The inputs that at least two rows agree on, most confirmed first; `rows` names one row of each group.

    bias_grad: what the rows were divided by. Rows of one size do not count as several: where updates are rounded to a
    few values, many small rows become the same. Different samples' errors never have one size.
    """
    sizes = bias_grad[inversion.rows]
    estimates = inversion.inputs
    gram = estimates @ estimates.T
    norms = gram.diagonal()
    distance = (norms.unsqueeze(0) + norms.unsqueeze(1) - 2 * gram).clamp(min=0).sqrt()
    agree = distance <= tolerance * norms.sqrt().unsqueeze(1)
    inputs, rows = [], []
    free = torch.ones(len(estimates), dtype=torch.bool, device=estimates.device)
    for row in agree.sum(1).argsort(descending=True).tolist():
        group = agree[row] & free
        if not free[row] or int(group.sum()) < LEAST_AGREEING:
            continue
        if differ_in_size(sizes[group]):
            inputs.append(estimates[group].mean(0))
            rows.append(int(inversion.rows[row]))
            free &= ~group
    if not inputs:
        return DenseInversion(estimates[:0], inversion.rows[:0], DenseStatus.NOT_INVERTIBLE)
    return DenseInversion(torch.stack(inputs), torch.tensor(rows), DenseStatus.AGREED)
