"""What may be assumed about samples before any update is seen: how much they vary, and along what."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprism.solvers.bounds.cube import Basis
from fedprism.solvers.bounds.search import Prior

DEVIATION = 0.25
"""Standard deviation of a pixel in [0, 1]: .25 in CIFAR-10, .24 in the embedded photographs, .26 in MNIST."""
FALL = 1.25
"""Variance at frequency f is proportional to (1 + f²) to the minus this: fitted to CIFAR-10 and the photographs."""
COLOURS = (0.85, 0.12, 0.03)
"""Shares of brightness, red against blue, and green against both: between CIFAR-10's and the photographs'."""
COLUMN_DEVIATION = 12**-0.5
"""Standard deviation of a number that is equally likely anywhere in [0, 1]."""

IMAGES = "natural images: pixels in [0, 1] of standard deviation 0.25, variance falling with frequency as 1/f^2.5"
COLUMNS = "independent values, equally likely anywhere in [0, 1]"


def natural_prior(shape: tuple[int, ...]) -> tuple[Prior, str]:
    """How much samples of this shape vary along which directions, and the same in words."""
    if len(shape) != 3 or min(shape[1:]) < 2:
        size = math.prod(shape)
        return Prior(Basis((torch.eye(size),)), torch.full((size,), COLUMN_DEVIATION**2)), COLUMNS
    channels, height, width = shape
    frequencies = torch.arange(height).unsqueeze(1) ** 2 + torch.arange(width) ** 2
    fall = (1.0 + frequencies.double()) ** -FALL
    colours, parts = _colours(channels)
    variances = parts[:, None, None] * fall / fall.sum() * DEVIATION**2 * math.prod(shape)
    waves = Basis((colours.float(), _cosines(height).float(), _cosines(width).float()))
    return Prior(waves, variances.flatten().float()), IMAGES


def _colours(channels: int) -> tuple[Tensor, Tensor]:
    """Orthonormal mixtures of the channels (channels, channels), and how the variance is shared between them."""
    if channels == 3:
        axes = torch.tensor([[1, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=torch.float64)
        return axes / axes.norm(dim=1, keepdim=True), torch.tensor(COLOURS, dtype=torch.float64)
    return torch.eye(channels, dtype=torch.float64), torch.full((channels,), 1 / channels, dtype=torch.float64)


def _cosines(size: int) -> Tensor:
    """The orthonormal discrete cosine transform (II): one row per frequency."""
    frequency, place = torch.arange(size, dtype=torch.float64).unsqueeze(1), torch.arange(size) + 0.5
    waves: Tensor = torch.cos(math.pi * frequency * place / size) * (2 / size) ** 0.5
    waves[0] /= 2**0.5
    return waves
