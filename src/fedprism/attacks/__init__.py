"""What an attacker can do with an observation. `ATTACKS` maps each name to a function that returns the attack."""

from __future__ import annotations

from collections.abc import Callable

from fedprism.attacks.base import Attack as Attack
from fedprism.attacks.base import Circumstances as Circumstances
from fedprism.attacks.base import UpdateAttack as UpdateAttack
from fedprism.attacks.class_fishing import ClassFishing as ClassFishing
from fedprism.attacks.class_fishing import class_fishing as class_fishing
from fedprism.attacks.cocktail_party import CocktailParty as CocktailParty
from fedprism.attacks.cocktail_party import cocktail_party as cocktail_party
from fedprism.attacks.curious_client import OtherClients as OtherClients
from fedprism.attacks.curious_client import OthersStatus as OthersStatus
from fedprism.attacks.dense_inversion import DenseInversion as DenseInversion
from fedprism.attacks.dense_inversion import dense_inversion as dense_inversion
from fedprism.attacks.disaggregation import Disaggregation as Disaggregation
from fedprism.attacks.disaggregation import disaggregation as disaggregation
from fedprism.attacks.embedding_inversion.attack import EmbeddingInversion as EmbeddingInversion
from fedprism.attacks.embedding_inversion.attack import embedding_inversion as embedding_inversion
from fedprism.attacks.encodings import Encodings as Encodings
from fedprism.attacks.encodings import instahide_decoding as instahide_decoding
from fedprism.attacks.encodings import mixup_decoding as mixup_decoding
from fedprism.attacks.gradient_matching.attack import GradientMatching as GradientMatching
from fedprism.attacks.gradient_matching.batchnorm import BatchNorm as BatchNorm
from fedprism.attacks.gradient_matching.batchnorm import Normalise as Normalise
from fedprism.attacks.gradient_matching.batchnorm import Pull as Pull
from fedprism.attacks.gradient_matching.forward import input_box as input_box
from fedprism.attacks.gradient_matching.labels import Labels as Labels
from fedprism.attacks.gradient_matching.presets import bn_exact as bn_exact
from fedprism.attacks.gradient_matching.presets import bn_infer as bn_infer
from fedprism.attacks.gradient_matching.presets import bn_proxy as bn_proxy
from fedprism.attacks.gradient_matching.presets import dlg as dlg
from fedprism.attacks.gradient_matching.presets import idlg as idlg
from fedprism.attacks.gradient_matching.presets import inverting_gradients as inverting_gradients
from fedprism.attacks.gradient_matching.presets import mixing_angle as mixing_angle
from fedprism.attacks.gradient_matching.presets import mixing_l2 as mixing_l2
from fedprism.attacks.gradient_matching.presets import mixing_orthogonal as mixing_orthogonal
from fedprism.attacks.gradient_matching.starts import Starts as Starts
from fedprism.attacks.gradient_matching.starts import gaussian_start as gaussian_start
from fedprism.attacks.gradient_matching.starts import uniform_start as uniform_start
from fedprism.attacks.imprint import Imprint as Imprint
from fedprism.attacks.imprint import imprint as imprint
from fedprism.attacks.mixed_samples import MixedSamples as MixedSamples
from fedprism.attacks.mixed_samples import mixup_at_once as mixup_at_once
from fedprism.attacks.mkor.attack import Mkor as Mkor
from fedprism.attacks.mkor.attack import mkor as mkor
from fedprism.attacks.mkor.attack import mkor_inconspicuous as mkor_inconspicuous
from fedprism.attacks.mkor.filters import Disguise as Disguise
from fedprism.attacks.mkor.head import Reference as Reference
from fedprism.attacks.patch_inversion import PatchInversion as PatchInversion
from fedprism.attacks.patch_inversion import patch_inversion as patch_inversion
from fedprism.attacks.property_inference import HoldsClass as HoldsClass
from fedprism.attacks.property_inference import Negative as Negative
from fedprism.attacks.property_inference import PropertyInference as PropertyInference
from fedprism.attacks.property_inference import property_inference as property_inference
from fedprism.attacks.reduction import Reduced as Reduced
from fedprism.attacks.reduction import Reduction as Reduction
from fedprism.attacks.reduction import Then as Then
from fedprism.attacks.reduction import then as then
from fedprism.attacks.row_space_inversion import RowSpaceInversion as RowSpaceInversion
from fedprism.attacks.row_space_inversion import row_space_inversion as row_space_inversion
from fedprism.attacks.span_inversion.attack import SpanInversion as SpanInversion
from fedprism.attacks.span_inversion.attack import span_inversion as span_inversion
from fedprism.attacks.token_inversion.attack import TokenInversion as TokenInversion
from fedprism.attacks.token_inversion.attack import token_inversion as token_inversion
from fedprism.attacks.updates import joined as joined
from fedprism.attacks.updates import split_updates as split_updates
from fedprism.runtime.cuda_graphs import Engine as Engine
from fedprism.runtime.executors import Processes as Processes
from fedprism.runtime.executors import RayCluster as RayCluster
from fedprism.runtime.executors import Serial as Serial
from fedprism.solvers.matching.distances import cosine as cosine
from fedprism.solvers.matching.distances import squared_error as squared_error
from fedprism.solvers.matching.features import FeatureInversion as FeatureInversion
from fedprism.solvers.matching.gradients import LBFGS as LBFGS
from fedprism.solvers.matching.gradients import Adam as Adam
from fedprism.solvers.matching.priors import Orthogonality as Orthogonality
from fedprism.solvers.matching.priors import TotalVariation as TotalVariation
from fedprism.solvers.separation.ica import StudentICA as StudentICA
from fedprism.solvers.windows import Smoothest as Smoothest
from fedprism.solvers.windows import interpolated_midpoint as interpolated_midpoint
from fedprism.solvers.windows import midpoint as midpoint
from fedprism.solvers.windows import softened_midpoint as softened_midpoint

ATTACKS: dict[str, Callable[[], Attack]] = {
    "dense-inversion": dense_inversion,
    "embedding-inversion": embedding_inversion,
    "token-inversion": token_inversion,
    "patch-inversion": patch_inversion,
    "row-space-inversion": row_space_inversion,
    "span-inversion": span_inversion,
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
