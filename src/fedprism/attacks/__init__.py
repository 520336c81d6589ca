"""What an attacker can do with an observation. `ATTACKS` maps each name to a function that returns the attack."""

from __future__ import annotations

from collections.abc import Callable

from fedprism.attacks.base import Attack, Circumstances, UpdateAttack
from fedprism.attacks.class_fishing import ClassFishing, class_fishing
from fedprism.attacks.cocktail_party import CocktailParty, cocktail_party
from fedprism.attacks.curious_client import OtherClients, OthersStatus
from fedprism.attacks.dense_inversion import DenseInversion, dense_inversion
from fedprism.attacks.disaggregation import Disaggregation, disaggregation
from fedprism.attacks.embedding_inversion.attack import EmbeddingInversion, embedding_inversion
from fedprism.attacks.encodings import Encodings, instahide_decoding, mixup_decoding
from fedprism.attacks.gradient_matching.attack import GradientMatching
from fedprism.attacks.gradient_matching.batchnorm import BatchNorm, Normalise, Pull
from fedprism.attacks.gradient_matching.forward import input_box
from fedprism.attacks.gradient_matching.labels import Labels
from fedprism.attacks.gradient_matching.presets import (
    bn_exact,
    bn_infer,
    bn_proxy,
    dlg,
    idlg,
    inverting_gradients,
    mixing_angle,
    mixing_l2,
    mixing_orthogonal,
)
from fedprism.attacks.gradient_matching.starts import Starts, gaussian_start, uniform_start
from fedprism.attacks.imprint import Imprint, imprint
from fedprism.attacks.mixed_samples import MixedSamples, mixup_at_once
from fedprism.attacks.mkor.attack import Mkor, mkor, mkor_inconspicuous
from fedprism.attacks.mkor.filters import Disguise
from fedprism.attacks.mkor.head import Reference
from fedprism.attacks.patch_inversion import PatchInversion, patch_inversion
from fedprism.attacks.property_inference import HoldsClass, Negative, PropertyInference, property_inference
from fedprism.attacks.reduction import Reduced, Reduction, Then, then
from fedprism.attacks.row_space_inversion import RowSpaceInversion, row_space_inversion
from fedprism.attacks.updates import joined, split_updates
from fedprism.runtime.cuda_graphs import Engine
from fedprism.runtime.executors import Processes, RayCluster, Serial
from fedprism.solvers.matching.distances import cosine, squared_error
from fedprism.solvers.matching.features import FeatureInversion
from fedprism.solvers.matching.gradients import LBFGS, Adam
from fedprism.solvers.matching.priors import Orthogonality, TotalVariation
from fedprism.solvers.separation.ica import StudentICA
from fedprism.solvers.windows import Smoothest, interpolated_midpoint, midpoint, softened_midpoint

ATTACKS: dict[str, Callable[[], Attack]] = {
    "dense-inversion": dense_inversion,
    "embedding-inversion": embedding_inversion,
    "patch-inversion": patch_inversion,
    "row-space-inversion": row_space_inversion,
    "gradient-matching": GradientMatching,
    "dlg": dlg,
    "idlg": idlg,
    "inverting-gradients": inverting_gradients,
    "bn-exact": bn_exact,
    "bn-infer": bn_infer,
    "bn-proxy": bn_proxy,
    "mixing-l2": mixing_l2,
    "mixing-angle": mixing_angle,
    "mixing-orthogonal": mixing_orthogonal,
    "cocktail-party": cocktail_party,
    "disaggregation": disaggregation,
    "property-inference": property_inference,
    "mixup-decoding": mixup_decoding,
    "instahide-decoding": instahide_decoding,
    "mixup-at-once": mixup_at_once,
    "class-fishing": class_fishing,
    "imprint": imprint,
    "mkor": mkor,
    "mkor-inconspicuous": mkor_inconspicuous,
}

__all__ = [
    "ATTACKS",
    "LBFGS",
    "Adam",
    "Attack",
    "BatchNorm",
    "Circumstances",
    "ClassFishing",
    "CocktailParty",
    "DenseInversion",
    "Disaggregation",
    "Disguise",
    "EmbeddingInversion",
    "Encodings",
    "Engine",
    "FeatureInversion",
    "GradientMatching",
    "HoldsClass",
    "Imprint",
    "Labels",
    "MixedSamples",
    "Mkor",
    "Negative",
    "Normalise",
    "Orthogonality",
    "OtherClients",
    "OthersStatus",
    "PatchInversion",
    "Processes",
    "PropertyInference",
    "Pull",
    "RayCluster",
    "Reduced",
    "Reduction",
    "Reference",
    "RowSpaceInversion",
    "Serial",
    "Smoothest",
    "Starts",
    "StudentICA",
    "Then",
    "TotalVariation",
    "UpdateAttack",
    "bn_exact",
    "bn_infer",
    "bn_proxy",
    "class_fishing",
    "cocktail_party",
    "cosine",
    "dense_inversion",
    "disaggregation",
    "dlg",
    "embedding_inversion",
    "gaussian_start",
    "idlg",
    "imprint",
    "input_box",
    "instahide_decoding",
    "interpolated_midpoint",
    "inverting_gradients",
    "joined",
    "midpoint",
    "mixing_angle",
    "mixing_l2",
    "mixing_orthogonal",
    "mixup_at_once",
    "mixup_decoding",
    "mkor",
    "mkor_inconspicuous",
    "patch_inversion",
    "property_inference",
    "row_space_inversion",
    "softened_midpoint",
    "split_updates",
    "squared_error",
    "then",
    "uniform_start",
]
