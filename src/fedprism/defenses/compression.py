"""Signs instead of numbers: what is left of an update is one bit an entry, or a trit.

Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD", ICML 2018, scaled by the mean magnitude as in Karimireddy,
Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD", ICML 2019. Behind pruning it is the sparse ternary compression of
Sattler, Wiedemann, Müller, Samek, "Robust and Communication-Efficient Federated Learning from Non-IID Data", 2019:
`chain(Prune(0.99), SignCompression())`.

Differs from the papers in: no error feedback, because a client is looked at for one round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.defenses.quantization import _Rounding


@dataclass(frozen=True)
class SignCompression(_Rounding):
    """Sends each tensor's signs times the mean magnitude of its nonzero entries; zeros stay zeros."""

    def rounded(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        kept = (tensor != 0).sum().clamp(min=1)
        return tensor.sign() * (tensor.abs().sum() / kept)
