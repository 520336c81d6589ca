"""Norm clipping: bound how long an update can be.

Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013 (algorithm 1); on a
client's whole update as in McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models",
ICLR 2018 (flat clipping). Clipping alone hides nothing but the length; it is what noise needs to give a guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.defenses.base import Context, Defense, change_floats, check_number, check_switch
from fedprism.types import Update


@dataclass(frozen=True)
class Clip(Defense):
    """Scales an update that is longer than `norm` down to that length; with `always`, every update to that length."""

    norm: float
    always: bool = False

    def __post_init__(self) -> None:
        check_number(self.norm, "Clip's norm", "1.0 is common")
        check_switch(self.always, "Clip's always")

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return clip_update(update, self.norm, always=self.always)


def clip_update(update: Update, norm: float, *, always: bool = False) -> Update:
    """Divide by max(1, length / norm), or with `always` by length / norm; whole-number tensors are left alone."""
    floating = [tensor for tensor in update.values() if tensor.dtype.is_floating_point]
    if not floating:
        return update
    # In double precision, where no square of a float overflows.
    lengths = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in floating]
    excess: Tensor = torch.linalg.vector_norm(torch.stack(lengths)) / norm
    # Dividing, not multiplying by norm / length: that overflows for the shortest updates.
    divisor = torch.where(excess > 0, excess, 1.0) if always else excess.clamp(min=1.0)
    return change_floats(update, lambda tensor: tensor / divisor.to(tensor.dtype))
