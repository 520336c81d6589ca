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
DETERMINED = 0.99
"""A patch counts as determined if at least this part of its variance is settled: a tenth of its spread stays open."""
LEAST_EXPLAINED = 0.1
"""Smallest part of the weight's gradient, beyond what chance explains, that says the gradients belong together."""


class PatchStatus(StrEnum):
    SOLVED = "the patches explain the patch layer's gradient to rounding error"
    UNDETERMINED = "the gradient leaves some patches open: they are guesses"
    RESIDUAL = "the patches explain only a part of the patch layer's gradient: approximate"
    UNRELATED = "the gradients of the patch layer and of the positions do not belong to one picture: nothing is read"
    EMPTY = "the gradient of the patch layer or of the positions is zero or not finite: nothing to read"


class PatchInversion(NamedTuple):
    patches: Tensor
    """(samples, patches, features): one sample, or none where nothing can be read."""
    determined: Tensor
    """(patches,) whether the gradient determines the patch."""
    residual: float
    """Part of the weight's gradient that the patches leave unexplained: 0 is nothing, 1 all."""
    explained: float
    """Part of the weight's gradient that they explain beyond what any patches would: 1 is all, 0 what chance gives."""
    status: PatchStatus


def invert_patches(weight_grad: Tensor, at_patches: Tensor, level: Tensor, spread: float) -> PatchInversion:
    """The patches (patches, features) of one picture, from the gradients of a weight and of each patch's embedding.

    weight_grad (channels, features), at_patches (patches, channels). `level` (patches, features) and `spread` say what
    patches are like before the gradient is read; they decide only where the gradient is silent or noisy.
    """
    rounding = ROUNDED * torch.finfo(weight_grad.dtype).eps
    mixing, right = at_patches.T.double(), weight_grad.double()
    if not all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in (mixing, right)):
        return _nothing(level, 1.0, 0.0, PatchStatus.EMPTY)
    # The singular vectors of the matrix itself: normal equations would square its condition.
    left, values, turn = torch.linalg.svd(mixing, full_matrices=False)
    kept = values > rounding * values[0]
    left, values, turn = left[:, kept], values[kept], turn[kept]
    missed = right - left @ (left.T @ right)
    size = float(right.norm())
    residual = float(missed.norm()) / size
    chance = 1 - len(values) / len(mixing)
    explained = 1 - residual**2 / chance if chance > 0 else 1.0
    if explained < LEAST_EXPLAINED:
        return _nothing(level, residual, explained, PatchStatus.UNRELATED)
    noise = _noise(missed, chance, rounding * size / math.sqrt(right.numel()))
    level = level.to(right)
    follows = values.square() / (values.square() + (noise / spread) ** 2)
    step = (follows / values).unsqueeze(1) * (left.T @ (right - mixing @ level))
    determined = (turn.square() * follows.unsqueeze(1)).sum(0) > DETERMINED
    status = _status(residual, determined, weight_grad)
    return PatchInversion((level + turn.T @ step).unsqueeze(0), determined, residual, explained, status)


def _nothing(like: Tensor, residual: float, explained: float, status: PatchStatus) -> PatchInversion:
    nothing = like.new_zeros(0, *like.shape, dtype=torch.float64)
    return PatchInversion(nothing, nothing.new_zeros(len(like)).bool(), residual, explained, status)


def _noise(missed: Tensor, chance: float, least: float) -> float:
    """Standard deviation of the noise in a gradient's entries, from what no patches explain of it."""
    unexplained = float(missed.square().mean() / chance) if chance > 0 else 0.0
    return max(math.sqrt(unexplained), least)


def _status(residual: float, determined: Tensor, weight_grad: Tensor) -> PatchStatus:
    if residual > math.sqrt(torch.finfo(weight_grad.dtype).eps):
        return PatchStatus.RESIDUAL
    return PatchStatus.SOLVED if bool(determined.all()) else PatchStatus.UNDETERMINED
