"""Priors: what an attacker believes about the inputs, as terms added to a matching objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.runtime.moments import Moments


@dataclass(frozen=True)
class TotalVariation:
    """Images and signals are smooth: weight times the mean |difference| of neighbours, summed over the directions.

    The columns of a table, (batch, columns), are in no order: there it says nothing, and `fits` is False. With
    `magnitude` that of |inputs|: images whose entries were given random signs (InstaHide) are smooth up to these.
    """

    weight: float
    magnitude: bool = False

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.fits(inputs.shape):
            return inputs.new_zeros(())
        values = inputs.abs() if self.magnitude else inputs
        ways = [values.diff(dim=side).abs() for side in range(2, values.dim())]
        return self.weight * sum((way.mean() for way in ways if way.numel()), inputs.new_zeros(()))

    @staticmethod
    def fits(shape: Sequence[int]) -> bool:
        """Whether a batch of this shape has neighbours: pixels, or points in time."""
        return len(shape) >= 3 and max(shape[2:]) > 1


@dataclass(frozen=True)
class Orthogonality:
    """The samples of a batch differ: weight times the sum over pairs of the mean squared product of their entries.

    Qian, Nassar, Hansen, "Minimal model structure analysis for input reconstruction in federated learning", 2021.
    """

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        squares = inputs.flatten(1).square()
        pairs = squares @ squares.T / squares.shape[1]
        return self.weight * (pairs.sum() - pairs.diagonal().sum())


@dataclass(frozen=True)
class BatchMoments:
    """The inputs of layers have known moments: weight times the `distance` of moments_of(inputs) to `wanted`.

    R_BN of Yin et al., "See through Gradients", CVPR 2021, in the form that Huang et al., NeurIPS 2021, used.
    """

    weight: float
    moments_of: Callable[[Tensor], Sequence[Moments]]
    wanted: Sequence[Moments]

    def distance(self, inputs: Tensor) -> Tensor:
        """Sum over layers of ||mean - wanted mean||_2 + ||var - wanted var||_2, every layer with the same weight."""
        pairs = zip(self.moments_of(inputs), self.wanted, strict=True)
        gaps = [a - b for pair in pairs for a, b in zip(*pair, strict=True)]
        return torch.stack([torch.linalg.vector_norm(gap) for gap in gaps]).sum()

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * self.distance(inputs)
