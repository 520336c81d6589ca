"""Secure aggregation: the server learns the sum of the clients' updates and none of them.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017; SecAgg+: Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", CCS 2020. Fixed-point numbers with stochastic rounding, and the defaults,
are those of SecAgg+ in Flower.

The masks cancel in the sum, so they are not simulated: what is left of the protocol in the numbers is each client's
rounding. Differs from Flower in: what is rounded is the update, not the weights after training; no client drops out
between the stages of a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.checks import whole
from fedprism.defenses.base import Chain, Context, Defense, change_floats, check_number
from fedprism.types import Update


@dataclass(frozen=True)
class SecureAggregation(Defense):
    """Only sums are seen, of updates clipped entry by entry to ±`clip` and rounded to steps of 2 `clip` / 2^`bits`.

    Rounding is random with the entry as its expectation. With `max_weight` an update is multiplied by its number of
    examples / `max_weight` before and divided by it after. The sum itself is not protected: put noise before this.
    """

    clip: float = 8.0
    bits: int = 22
    max_weight: float | None = None

    def __post_init__(self) -> None:
        whole(self.bits, "SecureAggregation's bits", 32)
        check_number(self.clip, "SecureAggregation's clip", "8.0 is common")
        if self.max_weight is not None:
            check_number(self.max_weight, "SecureAggregation's max_weight", "1000.0 is common")

    @property
    def sums_only(self) -> bool:
        return True

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        examples = len(context.batch) if context.batch is not None else None
        weight = examples / self.max_weight if self.max_weight is not None and examples else 1.0
        return change_floats(update, lambda tensor: self._rounded(tensor, weight, rng))

    def deterministic(self, observed: Update | None = None) -> Defense:
        # Rounding is flat almost everywhere: the forward model had better predict what was rounded.
        return Chain()

    def _rounded(self, tensor: Tensor, weight: float, rng: torch.Generator) -> Tensor:
        """In double precision, because single precision cannot tell the steps of more than 24 bits apart."""
        step = 2 * self.clip / 2**self.bits
        # Drawn on the CPU so that a seed means the same numbers on every device.
        chance = torch.rand(tensor.shape, generator=rng, dtype=torch.float64).to(tensor.device)
        position = (weight * tensor.double()).clamp(-self.clip, self.clip) / step
        rounded: Tensor = (position + chance).floor() * step / weight
        return rounded.to(tensor.dtype)
