"""The mathematics: plain functions on tensors that import nothing of fedprism. Numerical failure is a status."""

from fedprism.runtime.cuda_graphs import Engine, Repeated, Stepping
from fedprism.runtime.moments import Moments, channel_moments
from fedprism.solvers.closed_form.dense import (
    DenseInversion,
    DenseStatus,
    OutputLayerSolution,
    agreeing_rows,
    back_substitute,
    invert_dense,
    invert_single,
    numerical_rank,
    solve_output_layer,
)
from fedprism.solvers.closed_form.labels import LabelRecovery, LabelStatus, label_counts, sole_label, unique_labels
from fedprism.solvers.closed_form.patches import (
    PatchInversion,
    PatchStatus,
    TokensFed,
    invert_patches,
    invert_patches_by_attention,
)
from fedprism.solvers.denoising import nonlocal_means
from fedprism.solvers.matching.differences import TwoLosses
from fedprism.solvers.matching.distances import cosine, squared_error
from fedprism.solvers.matching.features import (
    FeatureInversion,
    InvertedFeatures,
    feature_cosine,
    feature_error,
    first_guess,
    invert_features,
    published_inversion,
)
from fedprism.solvers.matching.gradients import LBFGS, Adam, Matching, MatchingSettings, MatchingStatus, match_gradients
from fedprism.solvers.matching.priors import (
    BatchMoments,
    Orthogonality,
    TotalVariation,
    moments_distance,
    orthogonality,
    total_variation,
)
from fedprism.solvers.participation import (
    Identifiability,
    IdentifiabilityStatus,
    Participation,
    ParticipationStatus,
    UserStatus,
    disaggregate,
    identifiable_users,
    recover_participation,
)
from fedprism.solvers.separation.decode import DecodeStatus, Decoding, decode_mixtures
from fedprism.solvers.separation.exact_batch import Downstream, ExactBatch, ExactStatus, exact_batch
from fedprism.solvers.separation.ica import StudentICA, Unmixing, UnmixStatus, unmix
from fedprism.solvers.separation.mixture import Mixture, reduce_mixture
from fedprism.solvers.separation.published import CocktailObjective, embedding_objective
from fedprism.solvers.windows import (
    Lattice,
    Smoothest,
    WindowStatus,
    interpolated_midpoint,
    midpoint,
    smoothest_means,
    softened_midpoint,
)

__all__ = [
    "LBFGS",
    "Adam",
    "BatchMoments",
    "CocktailObjective",
    "DecodeStatus",
    "Decoding",
    "DenseInversion",
    "DenseStatus",
    "Downstream",
    "Engine",
    "ExactBatch",
    "ExactStatus",
    "FeatureInversion",
    "Identifiability",
    "IdentifiabilityStatus",
    "InvertedFeatures",
    "LabelRecovery",
    "LabelStatus",
    "Lattice",
    "Matching",
    "MatchingSettings",
    "MatchingStatus",
    "Mixture",
    "Moments",
    "Orthogonality",
    "OutputLayerSolution",
    "Participation",
    "ParticipationStatus",
    "PatchInversion",
    "PatchStatus",
    "Repeated",
    "Smoothest",
    "Stepping",
    "StudentICA",
    "TokensFed",
    "TotalVariation",
    "TwoLosses",
    "UnmixStatus",
    "Unmixing",
    "UserStatus",
    "WindowStatus",
    "agreeing_rows",
    "back_substitute",
    "channel_moments",
    "cosine",
    "decode_mixtures",
    "disaggregate",
    "embedding_objective",
    "exact_batch",
    "feature_cosine",
    "feature_error",
    "first_guess",
    "identifiable_users",
    "interpolated_midpoint",
    "invert_dense",
    "invert_features",
    "invert_patches",
    "invert_patches_by_attention",
    "invert_single",
    "label_counts",
    "match_gradients",
    "midpoint",
    "moments_distance",
    "nonlocal_means",
    "numerical_rank",
    "orthogonality",
    "published_inversion",
    "recover_participation",
    "reduce_mixture",
    "smoothest_means",
    "softened_midpoint",
    "sole_label",
    "solve_output_layer",
    "squared_error",
    "total_variation",
    "unique_labels",
    "unmix",
]
