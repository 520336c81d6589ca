"""Random noise on the update that leaves the client.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (section 5.1): Gaussian and Laplacian noise of a given scale.
Without clipping this carries no privacy guarantee; it only blurs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprism.defenses.base import Chain, Context, Defense, change_floats, check_number
from fedprism.types import Update


@dataclass(frozen=True)
class _AdditiveNoise(Defense):
    std: float

    def __post_init__(self) -> None:
        check_number(self.std, f"{type(self).__name__}'s std", "0.01 is common", zero=True)

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        """Noise of standard deviation 1, drawn on the CPU so that a seed means the same noise on every device."""
        raise NotImplementedError

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return change_floats(update, lambda tensor: tensor + self.std * self.unit_noise(tensor.shape, rng).to(tensor))

    def deterministic(self, observed: Update | None = None) -> Defense:
        return Chain()


class GaussianNoise(_AdditiveNoise):
    """Adds N(0, std²) to every entry of the update."""

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        return torch.randn(size, generator=rng)


class LaplaceNoise(_AdditiveNoise):
    """Adds Laplace noise of standard deviation `std` (scale std/√2) to every entry of the update."""

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        # The difference of two exponentials of rate √2 is Laplace with variance 1.
        first, second = (torch.empty(size).exponential_(2**0.5, generator=rng) for _ in range(2))
        return first - second
