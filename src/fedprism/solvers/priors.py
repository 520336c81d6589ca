"""What an attacker believes about the inputs before seeing an update: terms added to a matching objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class TotalVariation:
    """Images are smooth: weight times `total_variation`; zero for inputs without two spatial dimensions."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * total_variation(inputs) if inputs.dim() >= 4 else inputs.new_zeros(())


@dataclass(frozen=True)
class Orthogonality:
    """The samples of a batch differ: weight times `orthogonality`."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * orthogonality(inputs) if len(inputs) > 1 else torch.zeros_like(inputs[0].sum())
