"""Fewer bits for each entry of the update: a uniform grid, or a shorter floating-point type.

Grid with stochastic rounding: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017 (section 3). One bit:
Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD", ICML 2018, scaled by the mean magnitude as in Karimireddy,
Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD", ICML 2019.

Differs from the papers in: the grid reaches to the largest magnitude of each tensor, not to its length, so that nothing
lies beyond it; no entropy coding, which changes what is sent in bits but not in value; no error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.checks import choice, whole
from fedprism.defenses.base import Chain, Context, Defense, change_floats, check_switch
from fedprism.types import Update

_SHORT_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _Rounding(Defense):
    """Rounds each floating-point tensor separately."""

    def rounded(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        raise NotImplementedError

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return change_floats(update, lambda tensor: self.rounded(tensor, rng) if tensor.numel() else tensor)

    @property
    def by_chance(self) -> bool:
        return False

    def deterministic(self, observed: Update | None = None) -> Defense:
        # Rounding is flat almost everywhere: an attacker who repeats it has no gradient to follow, and had better
        # predict the unrounded update. Who wants to know what it sent itself has nothing to follow, and rounds.
        return self if observed is None and not self.by_chance else Chain()


@dataclass(frozen=True)
class Quantize(_Rounding):
    """Sends `bits` bits an entry: 2^bits - 1 evenly spaced values from minus to plus each tensor's largest magnitude.

    Rounding is to the nearest, ties to even; `stochastic` rounds so that the expectation is the entry. One bit is the
    sign (of zero: plus) times the mean magnitude; stochastic, times the largest. 32 bits change nothing.
    """

    bits: int
    stochastic: bool = False

    def __post_init__(self) -> None:
        whole(self.bits, "Quantize's bits", 32)
        check_switch(self.stochastic, "Quantize's stochastic")

    @property
    def by_chance(self) -> bool:
        return self.stochastic

    def rounded(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        if self.bits == 32:
            return tensor
        # Drawn on the CPU so that a seed means the same numbers on every device.
        chance = torch.rand(tensor.shape, generator=rng).to(tensor.device) if self.stochastic else None
        return _one_bit(tensor, chance) if self.bits == 1 else _on_grid(tensor, 2 ** (self.bits - 1) - 1, chance)


@dataclass(frozen=True)
class Cast(_Rounding):
    """Sends each entry as float16 or bfloat16; what lies beyond the type's range becomes its largest number."""

    dtype: str

    def __post_init__(self) -> None:
        choice(self.dtype, "Cast's dtype", _SHORT_TYPES)

    def rounded(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        short = _SHORT_TYPES[self.dtype]
        largest = torch.finfo(short).max
        return tensor.clamp(-largest, largest).to(short).to(tensor.dtype)


def _on_grid(tensor: Tensor, steps: int, chance: Tensor | None) -> Tensor:
    """The nearest value k / steps * largest, with `chance` a random neighbour; in double precision for over 24 bits."""
    exact = tensor.double()
    largest = exact.abs().amax()
    position = exact / torch.where(largest > 0, largest, 1.0) * steps
    nearest = position.round() if chance is None else (position + chance).floor()
    return (nearest / steps * largest).to(tensor.dtype)


def _one_bit(tensor: Tensor, chance: Tensor | None) -> Tensor:
    """Plus or minus the mean magnitude, by sign; with `chance`, the largest, with odds that make it unbiased."""
    magnitude = tensor.abs()
    if chance is None:
        return torch.where(tensor >= 0, magnitude.mean(), -magnitude.mean())
    largest = magnitude.amax()
    # The expectation of ±largest, plus with probability (1 + t / largest) / 2, is t.
    positive = (2 * chance - 1) * largest < tensor
    return torch.where(positive, largest, -largest)
