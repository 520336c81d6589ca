"""ImageSet: what every data set becomes, and what clients' batches are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedprism.checks import shown, whole
from fedprism.errors import BadInput
from fedprism.types import Batch

LARGEST_SEED = 2**53
"""Up to it every whole number is a float, and so the same in JSON: as in plans."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images: images (count, channels, height, width) uint8, labels (count,) int64."""

    name: str
    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """Number of classes, whether or not each has an image here."""
        return len(self.class_names)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        """The images with these indices as float32 inputs in [0, 1]."""
        chosen = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices), device="cpu")
        whole_numbers = not chosen.dtype.is_floating_point and chosen.dtype != torch.bool
        if not (chosen.dim() == 1 and len(chosen) and whole_numbers and 0 <= chosen.min() <= chosen.max() < len(self)):
            raise BadInput(
                f"{self.name} has images 0 to {len(self) - 1}; {shown(indices)} is not a list of such numbers."
            )
        chosen = chosen.long()
        return Batch(self.images[chosen].float() / 255, self.labels[chosen])

    def draw(
        self, count: int, rng: torch.Generator | None = None, *, seed: int | None = None, unique_labels: bool = False
    ) -> Batch:
        """`count` different images at random; with `unique_labels` at most one per class, classes equally likely.

        `seed` begins a generator of its own; with `rng` several draws go on with one generator.
        """
        if (rng is None) == (seed is None):
            raise BadInput(
                f"draw needs a seed or a generator, not {'neither' if rng is None else 'both'}. Write "
                f"draw({count}, seed=0) on {self.name}."
            )
        if rng is None:
            rng = torch.Generator().manual_seed(whole(seed, "seed", LARGEST_SEED, 0))
        order = torch.randperm(len(self), generator=rng, device=rng.device).cpu()
        if unique_labels:
            _, firsts = np.unique(self.labels[order].numpy(), return_index=True)
            order = order[torch.from_numpy(firsts)]
            order = order[torch.randperm(len(order), generator=rng, device=rng.device).cpu()]
        kind = "images of different classes" if unique_labels else "images"
        return self.batch(order[: whole(count, f"the number of {kind} drawn from {self.name}", len(order))])
