"""The ground truth of a simulation. Only `simulation` and `scoring` import this module, and a test enforces it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The private samples behind an observation, one row each, and whose they are.

    inputs (samples, *input_shape) in the model's input space; `bounds` and `normalization` turn them into pixels.
    """

    inputs: Tensor
    labels: Tensor
    owners: tuple[str, ...]
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
