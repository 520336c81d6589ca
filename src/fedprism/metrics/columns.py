"""Whether single columns of table rows came back: numbers within a tolerance, categories exactly.

A mean error over a row says little about a table: half a category is no answer, and an age that is off by a year is
one. So every column is judged by itself, and the result is yes or no.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_tolerance(reconstruction: Tensor, source: Tensor, tolerance: float) -> Tensor:
    """(N,) and (N,) -> (N,) bool: the number is off by at most `tolerance`, in the units of both."""
    _same_shape(reconstruction, source, 1)
    # A hair more than asked for: 0.35 - 0.3 is not 0.05 in binary.
    return (reconstruction - source).abs() <= tolerance * (1 + 1e-6)


def same_category(reconstruction: Tensor, source: Tensor) -> Tensor:
    """(N, categories) and (N, categories) -> (N,) bool: the largest entry of a one-hot block is the right one.

    A block whose largest entries are equal, such as one of zeros, names no category and is wrong.
    """
    _same_shape(reconstruction, source, 2)
    largest, guess = reconstruction.max(1)
    alone = (reconstruction == largest.unsqueeze(1)).sum(1) == 1
    return alone & (guess == source.argmax(1)) & torch.isfinite(largest)


def _same_shape(reconstruction: Tensor, source: Tensor, dimensions: int) -> None:
    if reconstruction.shape != source.shape or source.ndim != dimensions:
        raise ValueError(
            f"expected two columns of one shape with {dimensions} dimensions, found {tuple(reconstruction.shape)} and "
            f"{tuple(source.shape)}; pair every reconstruction with one source."
        )
