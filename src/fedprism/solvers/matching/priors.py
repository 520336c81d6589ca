"""Priors: what an attacker believes about the inputs, as terms added to a matching objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.runtime.moments import Moments


def total_variation(images: Tensor) -> Tensor:
    """Anisotropic total variation of (..., height, width): mean |horizontal| + mean |vertical difference|."""
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return horizontal + vertical


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


@dataclass(frozen=True)
class TotalVariation:
    """Images are smooth: weight times `total_variation`; zero for inputs without two spatial dimensions.

    With `magnitude` that of |inputs|: images whose entries were given random signs (InstaHide) are smooth up to these.
    """

    weight: float
    magnitude: bool = False

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dim() < 4:
            return inputs.new_zeros(())
        return self.weight * total_variation(inputs.abs() if self.magnitude else inputs)


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
