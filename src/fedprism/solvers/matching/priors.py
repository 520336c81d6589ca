"""Priors: what an attacker believes about the inputs, as terms added to a matching objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.runtime.moments import Moments


@dataclass(frozen=True)
class TotalVariation:
    """Images are smooth: weight times (mean |horizontal| + mean |vertical difference|) of (n, channels, height, width).

    Zero for inputs without two spatial dimensions. With `magnitude` that of |inputs|: images whose entries were given
    random signs (InstaHide) are smooth up to these.
    """

    weight: float
    magnitude: bool = False

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dim() < 4:
            return inputs.new_zeros(())
        images = inputs.abs() if self.magnitude else inputs
        horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
        vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
        return self.weight * (horizontal + vertical)


@dataclass(frozen=True)
class Orthogonality:
    """The samples of a batch differ: weight times the sum over pairs of the mean squared product of their entries.

    Qian, Nair, Hansen, "What is it like to be a bad gradient: minimal conditions for gradient inversion", 2020.
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
