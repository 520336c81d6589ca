"""What a client can do to its update before it leaves. Each defense is a frozen dataclass; `chain` composes them."""

from __future__ import annotations

from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.defenses.noise import GaussianNoise, LaplaceNoise
from fedprism.defenses.pruning import Prune

DEFENSES: dict[str, type[Defense]] = {
    "prune": Prune,
    "gaussian-noise": GaussianNoise,
    "laplace-noise": LaplaceNoise,
}

__all__ = ["DEFENSES", "Chain", "Context", "Defense", "GaussianNoise", "LaplaceNoise", "Prune", "chain"]
