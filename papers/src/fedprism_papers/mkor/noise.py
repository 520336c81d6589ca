"""Noise on either side of MKOR: on the parameters that the server sends, and on the update that comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.types import Observation


@dataclass(frozen=True)
class WithNoise:
    """A server that hides its choice of parameters under noise, as the paper's code can.

    Its standard deviation is `noise` over the root of the number of inputs of a unit.
    """

    server: Any
    noise: float

    def tamper(
        self, model: nn.Module, params: Mapping[str, Tensor], rng: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sent, trapdoor = self.server.tamper(model, params, rng)
        spreads = {
            name.removesuffix("weight"): self.noise / (tensor.numel() / len(tensor)) ** 0.5
            for name, tensor in sent.items()
            if tensor.dim() > 1
        }
        return {
            name: tensor
            + spreads.get(name.removesuffix("weight").removesuffix("bias"), 0.0)
            * torch.randn(tensor.shape, generator=rng).to(tensor)
            for name, tensor in sent.items()
        }, trapdoor


def noised(observation: Observation, noise: float, rng: torch.Generator) -> Observation:
    """The update with Gaussian noise, as large in each tensor as this part of its standard deviation."""
    sent = observation.rounds[0]
    update = {
        name: tensor + noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=rng)
        for name, tensor in sent.update.items()
    }
    return replace(observation, rounds=(replace(sent, update=update),))
