"""A random factor on every update: sums in which no user's update is twice the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprism.defenses.base import Chain, Context, Defense, change_floats
from fedprism.errors import BadInput
from fedprism.types import Update


@dataclass(frozen=True)
class RandomWeights(Defense):
    """Multiplies each update by a number drawn evenly from 1 - `spread` to 1 + `spread`."""

    spread: float

    def __post_init__(self) -> None:
        if not 0 < self.spread <= 1:
            raise BadInput(
                f"RandomWeights' spread must be above 0 and at most 1, not {self.spread}. 0.5 draws from 0.5 to 1.5."
            )

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        factor = 1 + self.spread * (2 * float(torch.rand((), generator=rng)) - 1)
        return change_floats(update, lambda tensor: factor * tensor)

    def deterministic(self, observed: Update | None = None) -> Defense:
        return Chain()
