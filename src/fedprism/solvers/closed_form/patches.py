"""Patches of a picture out of the gradient of the layer that embeds them, in closed form.

For e_p = W x_p + b the weight's gradient is the sum over the patches p of d_p x_pᵀ, where d_p is the gradient at the
embedding e_p. A position parameter that is added to the embeddings has exactly these d_p as its own gradient. For one
picture all d_p are then known, and its patches are the solution of a linear system.

Lu, Zhang, Zhao, He, Cheng, "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers", CVPR 2022 (the
position parameter's gradient opens the first attention layer); here the patch layer itself is solved.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDED = 4.0
"""Rounding errors of a gradient's entries, in units of its number format's precision: what sums of products leave."""
DETERMINED = 1 - 1e-5
"""Part of a patch's variance that is settled if it counts as determined: 60 dB, if pixels are spread evenly."""
REWEIGHTED = 2
"""How often rows are weighed again by the noise that they show."""
LEAST_EXPLAINED = 0.1
"""Smallest part of the weight's gradient, beyond what chance explains, that says the gradients belong together."""


class PatchStatus(StrEnum):
    SOLVED = "the patches solve their linear system to rounding error"
    UNDETERMINED = "the linear system leaves some patches open to more than a three-hundredth of their spread: guesses"
    RESIDUAL = "the patches solve their linear system only in part: approximate"
    UNRELATED = "the gradients do not fit together as those of one sample's patches do: nothing is read"
    CROWDED = "the first attention has too few channels for so many patches: nothing is read"
    EMPTY = "a gradient that is needed is zero or not finite: nothing to read"


class InvertedPatches(NamedTuple):
    patches: Tensor
    """(samples, patches, features): one sample, or none where nothing can be read."""
    determined: Tensor
    """(patches,) whether the gradient determines the patch."""
    residual: float
    """Part of the weight's gradient that the patches leave unexplained: 0 is nothing, 1 all."""
    explained: float
    """Part of the weight's gradient that they explain beyond what any patches would: 1 is all, 0 what chance gives."""
    status: PatchStatus
    span: Tensor
    """(dimensions, features): orthonormal; every patch is a combination of them."""


class TokensFed(NamedTuple):
    """What stands between patches and projections: tokens weight x + fixed, each divided by its size, gain, shift."""

    fixed: Tensor
    """(patches, channels)"""
    tokens: int
    """Of one picture, class tokens too."""
    gain: Tensor | None = None
    """(channels,) of the norm; None if there is no norm."""
    shift: Tensor | None = None
    """(channels,)"""
    centred: bool = False
    """Whether the norm takes away each token's mean."""


def invert_patches(weight_grad: Tensor, at_patches: Tensor, level: Tensor, spread: float) -> InvertedPatches:
    """The patches (patches, features) of one picture, from the gradients of a weight and of each patch's embedding.

    weight_grad (channels, features), at_patches (patches, channels). `level` (patches, features) and `spread` say what
    patches are like before the gradient is read; they decide only where the gradient is silent or noisy.
    """
    if not (_usable(weight_grad) and _usable(at_patches)):
        return _nothing(level, 1.0, 0.0, PatchStatus.EMPTY)
    rounding = ROUNDED * torch.finfo(weight_grad.dtype).eps
    solved = _solve(at_patches.T.double(), weight_grad.double(), level, spread, rounding)
    return _answer(solved, level, torch.eye(level.shape[1], dtype=torch.float64, device=level.device))


def invert_patches_by_attention(
    weight: Tensor, weight_grad: Tensor, projections_grad: Tensor, fed: TokensFed, level: Tensor, spread: float
) -> InvertedPatches:
    """The same without the gradient at the patches, from that of the first attention's projections (rows, channels).

    Tokens are weight x_p + fixed_p. What the projections are fed lies in the row space of their gradients, and the
    patches in that of the patch layer's. Fixed parts that differ tell the patches apart: for each there is one linear
    system, all of them with the same matrix.
    """
    if not (_usable(weight_grad) and _usable(projections_grad)):
        return _nothing(level, 1.0, 0.0, PatchStatus.EMPTY)
    basis = torch.eye(level.shape[1], dtype=torch.float64, device=weight.device)
    if len(level) < level.shape[1]:
        basis = _span_and_rest(weight_grad.double(), len(level))[: len(level)]
    outside = _outside(projections_grad.double(), fed)
    matrix = outside @ weight.double() @ basis.T
    if len(matrix) <= matrix.shape[1]:
        return _nothing(level, 1.0, 0.0, PatchStatus.CROWDED)
    rounding = ROUNDED * torch.finfo(weight_grad.dtype).eps
    solved = _solve(matrix, -outside @ fed.fixed.double().T, basis @ level.double().T, spread, rounding)
    settled = 1 - ((1 - solved.settled) @ basis.square()).amax().expand(len(level))
    solved = solved._replace(unknowns=(basis.T @ solved.unknowns).T, settled=settled)
    return _answer(solved, level, basis)


def _span_and_rest(gradient: Tensor, rank: int) -> Tensor:
    """An orthonormal basis of all columns (columns, columns), the first `rank` of which span the rows.

    Rows are weighed by the noise that they show: rounding is relative to a row's size, and a small row tells as much.
    """
    size = gradient.norm(dim=1, keepdim=True)
    gradient, size = gradient[size[:, 0] > 0], size[size[:, 0] > 0]
    noise = size
    for _ in range(REWEIGHTED):
        span = torch.linalg.svd(gradient / noise, full_matrices=False).Vh[:rank]
        left = (gradient - gradient @ span.T @ span).norm(dim=1, keepdim=True)
        noise = left.clamp_min(torch.finfo(gradient.dtype).eps * size)
    basis: Tensor = torch.linalg.svd(gradient / noise, full_matrices=True).Vh
    return basis


def _outside(projections_grad: Tensor, fed: TokensFed) -> Tensor:
    """What is zero for every token (equations, channels): the directions that no row of the gradients has a part in."""
    outside = _span_and_rest(projections_grad, fed.tokens)[fed.tokens :]
    along = None if fed.shift is None else outside @ fed.shift.double()
    if fed.gain is not None:
        outside = outside * fed.gain.double()
    if fed.centred:
        outside = outside - outside.mean(1, keepdim=True)
    if along is None or not bool(along.any()):
        return outside
    # Each token's size is unknown and multiplies the shift: what points along the shift says nothing.
    return outside - along.outer(along @ outside) / along.square().sum()


class _Solution(NamedTuple):
    unknowns: Tensor
    """(unknowns, columns)"""
    settled: Tensor
    """(unknowns,) part of each one's variance that the equations settle, 0 to 1."""
    residual: float
    explained: float
    rounded: bool
    """Whether rounding alone explains the residual."""


def _solve(matrix: Tensor, right: Tensor, level: Tensor, spread: float, rounding: float) -> _Solution:
    """The likeliest unknowns (unknowns, columns) of matrix @ unknowns = right, if noise is as large as it seems."""
    # The singular vectors of the matrix itself: normal equations would square its condition.
    left, values, turn = torch.linalg.svd(matrix, full_matrices=False)
    kept = values > rounding * values[0]
    left, values, turn = left[:, kept], values[kept], turn[kept]
    missed = right - left @ (left.T @ right)
    size = float(right.norm())
    residual = float(missed.norm()) / size if size > 0 else 1.0
    chance = 1 - len(values) / len(matrix)
    explained = 1 - residual**2 / chance if chance > 0 else 1.0
    # Noise as large as what no unknowns explain, and never less than rounding leaves.
    noise = max(
        math.sqrt(float(missed.square().mean()) / chance) if chance > 0 else 0.0,
        rounding * size / math.sqrt(right.numel()),
    )
    level = level.to(right)
    follows = values.square() / (values.square() + (noise / spread) ** 2)
    step = (follows / values).unsqueeze(1) * (left.T @ (right - matrix @ level))
    settled = (turn.square() * follows.unsqueeze(1)).sum(0)
    return _Solution(level + turn.T @ step, settled, residual, explained, residual <= math.sqrt(rounding / ROUNDED))


def _answer(solved: _Solution, level: Tensor, span: Tensor) -> InvertedPatches:
    if solved.explained < LEAST_EXPLAINED:
        return _nothing(level, solved.residual, solved.explained, PatchStatus.UNRELATED)
    determined = solved.settled > DETERMINED
    status = PatchStatus.SOLVED if bool(determined.all()) else PatchStatus.UNDETERMINED
    status = status if solved.rounded else PatchStatus.RESIDUAL
    patches = solved.unknowns.unsqueeze(0)
    return InvertedPatches(patches, determined, solved.residual, solved.explained, status, span)


def _usable(gradient: Tensor) -> bool:
    return bool(gradient.isfinite().all()) and bool(gradient.any())


def _nothing(like: Tensor, residual: float, explained: float, status: PatchStatus) -> InvertedPatches:
    nothing = like.new_zeros(0, *like.shape, dtype=torch.float64)
    return InvertedPatches(
        nothing,
        nothing.new_zeros(len(like)).bool(),
        residual,
        explained,
        status,
        span=nothing.new_zeros(0, like.shape[1]),
    )
