"""Squared error instead of cross-entropy: the gradient of every output then depends on every sample.

Eloul et al., "Enhancing Privacy against Inversion Attacks in Federated Learning by using
Mixing Gradients Strategies", 2022 (choosing the loss).

What mixes is the squared error of the *raw* outputs. That of the softmax weighs a sample by its own class nearly as
cross-entropy does where the predictions are nearly uniform and classes are many (research/mixing-gradients.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.defenses.base import Defense, check_switch
from fedprism.losses import mse, softmax_mse
from fedprism.types import LossFn


@dataclass(frozen=True)
class MseLoss(Defense):
    """Trains with the squared error against one-hot labels, of the softmax's probabilities or of the raw outputs."""

    softmax: bool = True

    def __post_init__(self) -> None:
        check_switch(self.softmax, "MseLoss's softmax")

    def on_loss(self, loss: LossFn) -> LossFn:
        return softmax_mse if self.softmax else mse
