"""Random noise on the update that leaves the client.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (section 5.1): Gaussian and Laplacian noise of a given scale.
Noise relative to a tensor: Wang, Velipasalar, Gursoy (MKOR), WACV 2024 (section 4, table 4).
Without clipping this carries no privacy guarantee; it only blurs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprism.defenses.base import Chain, Context, Defense, change_floats, check_number
from fedprism.errors import BadInput
from fedprism.types import Update


@dataclass(frozen=True)
class _AdditiveNoise(Defense):
    std: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("std", "relative") if getattr(self, name) is not None]
        if len(given) != 1:
            found = "both" if given else "neither"
            raise BadInput(f"{type(self).__name__} needs std or relative, one of them, not {found}. Example: std=0.01.")
        check_number(getattr(self, given[0]), f"{type(self).__name__}'s {given[0]}", "0.01 is common", zero=True)

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        """Noise of standard deviation 1, drawn on the CPU so that a seed means the same noise on every device."""
        raise NotImplementedError

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        def noised(tensor: torch.Tensor) -> torch.Tensor:
            noise = self.unit_noise(tensor.shape, rng).to(tensor)
            if self.std is not None:
                return tensor + self.std * noise
            return tensor + (self.relative or 0.0) * tensor.std(correction=0) * noise if tensor.numel() else tensor

        return change_floats(update, noised)

    def deterministic(self, observed: Update | None = None) -> Defense:
        return Chain()


class GaussianNoise(_AdditiveNoise):
    """Adds N(0, std²) to every entry of the update.

    relative: instead of std, so many times the standard deviation of each tensor's own entries.
    """

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        return torch.randn(size, generator=rng)


class LaplaceNoise(_AdditiveNoise):
    """Adds Laplace noise of standard deviation `std` (scale std/√2) to every entry of the update.

    relative: instead of std, so many times the standard deviation of each tensor's own entries.
    """

    def unit_noise(self, size: torch.Size, rng: torch.Generator) -> torch.Tensor:
        # The difference of two exponentials of rate √2 is Laplace with variance 1.
        first, second = (torch.empty(size).exponential_(2**0.5, generator=rng) for _ in range(2))
        return first - second
