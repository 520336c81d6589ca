"""What an attacker can do with an observation. `ATTACKS` maps each name to a function that returns the attack."""

from __future__ import annotations

from collections.abc import Callable

from fedprism.attacks.base import Attack, PerClient, Reduced, Reduction, Then, then
from fedprism.attacks.cocktail_party import CocktailParty, cocktail_party
from fedprism.attacks.dense_inversion import DenseInversion, dense_inversion
from fedprism.attacks.disaggregation import Disaggregation, disaggregation
from fedprism.attacks.gradient_matching import (
    GradientMatching,
    Labels,
    bn_exact,
    bn_infer,
    bn_proxy,
    dlg,
    gaussian_start,
    idlg,
    inverting_gradients,
    mixing_angle,
    mixing_l2,
    mixing_orthogonal,
    uniform_start,
)
from fedprism.attacks.property_inference import HoldsClass, Negative, PropertyInference, property_inference
from fedprism.batchnorm import Normalise, Pull
from fedprism.executing import Processes, RayCluster, Serial
from fedprism.solvers.features import FeatureInversion
from fedprism.solvers.ica import StudentICA
from fedprism.solvers.matching import LBFGS, Adam, cosine, squared_error
from fedprism.solvers.priors import Orthogonality, TotalVariation
from fedprism.solvers.published import CocktailObjective, embedding_objective

ATTACKS: dict[str, Callable[[], Attack]] = {
    "dense-inversion": dense_inversion,
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
}

__all__ = [
    "ATTACKS",
    "LBFGS",
    "Adam",
    "Attack",
    "CocktailObjective",
    "CocktailParty",
    "DenseInversion",
    "Disaggregation",
    "FeatureInversion",
    "GradientMatching",
    "HoldsClass",
    "Labels",
    "Negative",
    "Normalise",
    "Orthogonality",
    "PerClient",
    "Processes",
    "PropertyInference",
    "Pull",
    "RayCluster",
    "Reduced",
    "Reduction",
    "Serial",
    "StudentICA",
    "Then",
    "TotalVariation",
    "bn_exact",
    "bn_infer",
    "bn_proxy",
    "cocktail_party",
    "cosine",
    "dense_inversion",
    "disaggregation",
    "dlg",
    "embedding_objective",
    "gaussian_start",
    "idlg",
    "inverting_gradients",
    "mixing_angle",
    "mixing_l2",
    "mixing_orthogonal",
    "property_inference",
    "squared_error",
    "then",
    "uniform_start",
]
