"""Priors: what an attacker believes about the inputs, as terms added to a matching objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.runtime.moments import Moments


def total_variation(images: Tensor) -> Tensor:
    """Anisotropic total variation of (..., height, width): mean |horizontal| + mean |vertical difference|."""
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs()
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs()
    return sum((way.mean() for way in (horizontal, vertical) if way.numel()), images.new_zeros(()))


def orthogonality(inputs: Tensor) -> Tensor:
    """Sum over pairs of different samples of the mean squared product of their entries; 0 where none overlap.

    Qian, Nair, Hansen, "What is it like to be a bad gradient: minimal conditions for gradient inversion", 2020.
    """
    squares = inputs.flatten(1).square()
    pairs = squares @ squares.T / squares.shape[1]
    return pairs.sum() - pairs.diagonal().sum()


def moments_distance(moments: Sequence[Moments], wanted: Sequence[Moments]) -> Tensor:
    """Sum over layers of ||mean - wanted mean||_2 + ||var - wanted var||_2, every layer with the same weight.

    R_BN of Yin et al., "See through Gradients", CVPR 2021, in the form that Huang et al., NeurIPS 2021, used.
    """
    gaps = [a - b for pair in zip(moments, wanted, strict=True) for a, b in zip(*pair, strict=True)]
    return torch.stack([torch.linalg.vector_norm(gap) for gap in gaps]).sum()


def variation_along(signals: Tensor) -> Tensor:
    """Total variation of signals (..., length): mean |difference|."""
    return (signals[..., 1:] - signals[..., :-1]).abs().mean()


@dataclass(frozen=True)
class TotalVariation:
    """Images and signals are smooth: weight times `total_variation`, or `variation_along` of (batch, channels, length).

    The columns of a table, (batch, columns), are in no order: there it says nothing, and `fits` is False.

    With `magnitude` that of |inputs|: images whose entries were given random signs (InstaHide) are smooth up to these.
    """

    weight: float
    magnitude: bool = False

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.fits(inputs.shape):
            return inputs.new_zeros(())
        values = inputs.abs() if self.magnitude else inputs
        return self.weight * (variation_along(values) if inputs.dim() == 3 else total_variation(values))

    @staticmethod
    def fits(shape: Sequence[int]) -> bool:
        """Whether a batch of this shape has neighbours: pixels, or points in time."""
        return len(shape) >= 3 and max(shape[2:]) > 1


@dataclass(frozen=True)
class Orthogonality:
    """The samples of a batch differ: weight times `orthogonality`."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * orthogonality(inputs) if len(inputs) > 1 else torch.zeros_like(inputs[0].sum())


@dataclass(frozen=True)
class BatchMoments:
    """The inputs of layers have known moments: weight times `moments_distance` of moments_of(inputs) to `wanted`."""

    weight: float
    moments_of: Callable[[Tensor], Sequence[Moments]]
    wanted: Sequence[Moments]

    def distance(self, inputs: Tensor) -> Tensor:
        return moments_distance(self.moments_of(inputs), self.wanted)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * self.distance(inputs)
