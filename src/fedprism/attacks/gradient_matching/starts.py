"""Where gradient matching starts from, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.naming import EvaluableRepr

Start: TypeAlias = Callable[[tuple[int, ...], torch.Generator], Tensor]


def gaussian_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(shape, generator=rng)


def uniform_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Uniform noise in [0, 1)."""
    return torch.rand(shape, generator=rng)


@dataclass(frozen=True, kw_only=True, repr=False)
class Starts(EvaluableRepr):
    """How many random starts there are; the answer with the smallest objective is returned.

    race: the fraction of the iterations that each start gets; the best start gets the rest. 0: every start gets all.
    """

    restarts: int = 1
    race: float = 0.0

    def __post_init__(self) -> None:
        if self.restarts < 1 or not 0 <= self.race * self.restarts < 1:
            raise BadInput(
                f"restarts must be at least one, and race times restarts in [0, 1), not {self.restarts} restarts and "
                f"a race of {self.race}; leave iterations for the winner."
            )

    def heat(self, iterations: int) -> int:
        """How many iterations each start of a race gets; 0 where there is no race."""
        return int(self.race * iterations)

    def total(self, iterations: int) -> int:
        """The iterations of all runs together."""
        return iterations if self.heat(iterations) else iterations * self.restarts
