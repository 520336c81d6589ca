"""What a client can do to its update before it leaves. Each defense is a frozen dataclass; `chain` composes them."""

from __future__ import annotations

from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.defenses.clipping import Clip
from fedprism.defenses.compression import SignCompression
from fedprism.defenses.counts import (
    COUNT_RELEASES,
    BlurredCounts,
    CountRelease,
    GeometricCounts,
    LaplaceCounts,
    NormalCounts,
    RoundedCounts,
    WithheldCounts,
)
from fedprism.defenses.dp_sgd import DpSgd
from fedprism.defenses.equal_labels import EqualLabels
from fedprism.defenses.instahide import InstaHide
from fedprism.defenses.mixup import MixUp
from fedprism.defenses.mse_loss import MseLoss
from fedprism.defenses.noise import GaussianNoise, LaplaceNoise
from fedprism.defenses.pruning import Prune
from fedprism.defenses.quantization import Cast, Quantize
from fedprism.defenses.secure_aggregation import SecureAggregation
from fedprism.defenses.soteria import Soteria
from fedprism.defenses.weights import RandomWeights

DEFENSES: dict[str, type[Defense]] = {
    "prune": Prune,
    "clip": Clip,
    "quantize": Quantize,
    "cast": Cast,
    "gaussian-noise": GaussianNoise,
    "laplace-noise": LaplaceNoise,
    "dp-sgd": DpSgd,
    "secure-aggregation": SecureAggregation,
    "equal-labels": EqualLabels,
    "mse-loss": MseLoss,
    "mixup": MixUp,
    "instahide": InstaHide,
    "soteria": Soteria,
    "sign-compression": SignCompression,
    "random-weights": RandomWeights,
}

__all__ = [
    "COUNT_RELEASES",
    "DEFENSES",
    "BlurredCounts",
    "Cast",
    "Chain",
    "Clip",
    "Context",
    "CountRelease",
    "Defense",
    "DpSgd",
    "EqualLabels",
    "GaussianNoise",
    "GeometricCounts",
    "InstaHide",
    "LaplaceCounts",
    "LaplaceNoise",
    "MixUp",
    "MseLoss",
    "NormalCounts",
    "Prune",
    "Quantize",
    "RandomWeights",
    "RoundedCounts",
    "SecureAggregation",
    "SignCompression",
    "Soteria",
    "WithheldCounts",
    "chain",
]
