"""What a client can do to its update before it leaves. Each defense is a frozen dataclass; `chain` composes them."""

from __future__ import annotations

from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.defenses.clipping import Clip
from fedprism.defenses.dp_sgd import DpSgd
from fedprism.defenses.noise import GaussianNoise, LaplaceNoise
from fedprism.defenses.pruning import Prune
from fedprism.defenses.quantization import Cast, Quantize
from fedprism.defenses.secure_aggregation import SecureAggregation

DEFENSES: dict[str, type[Defense]] = {
    "prune": Prune,
    "clip": Clip,
    "quantize": Quantize,
    "cast": Cast,
    "gaussian-noise": GaussianNoise,
    "laplace-noise": LaplaceNoise,
    "dp-sgd": DpSgd,
    "secure-aggregation": SecureAggregation,
}

__all__ = [
    "DEFENSES",
    "Cast",
    "Chain",
    "Clip",
    "Context",
    "Defense",
    "DpSgd",
    "GaussianNoise",
    "LaplaceNoise",
    "Prune",
    "Quantize",
    "SecureAggregation",
    "chain",
]
