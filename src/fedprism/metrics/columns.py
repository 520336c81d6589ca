"""Whether single columns of table rows were recovered: numbers within a tolerance, categories exactly."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Relative allowance on a tolerance: 0.35 - 0.3 is not 0.05 in binary."""


def within_tolerance(reconstruction: Tensor, source: Tensor, tolerance: float) -> Tensor:
    """(N,) and (N,) -> (N,) bool: the number is off by at most `tolerance`, in the units of both."""
    _same_shape(reconstruction, source, 1)
    return (reconstruction - source).abs() <= tolerance * (1 + ROUNDING)


def same_category(reconstruction: Tensor, source: Tensor) -> Tensor:
    """(N, categories) twice -> (N,) bool: one entry of the one-hot block is the largest, and it is the right one."""
    _same_shape(reconstruction, source, 2)
    largest, guess = reconstruction.max(1)
    alone = (reconstruction == largest.unsqueeze(1)).sum(1) == 1
    return alone & (guess == source.argmax(1)) & torch.isfinite(largest)


def _same_shape(reconstruction: Tensor, source: Tensor, dimensions: int) -> None:
    if reconstruction.shape != source.shape or source.ndim != dimensions:
        raise ValueError(
            f"reconstruction {tuple(reconstruction.shape)} and source {tuple(source.shape)} must have one "
            f"shape with {dimensions} dimensions."
        )
