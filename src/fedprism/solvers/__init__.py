"""Plain functions on tensors that import nothing of fedprism but `runtime`. Numerical failure is a status."""

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
from fedprism.solvers.matching.priors import BatchMoments, Orthogonality, TotalVariation
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
    "DecodeStatus",
    "Decoding",
    "DenseInversion",
    "DenseStatus",
    "Downstream",
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
    "Orthogonality",
    "OutputLayerSolution",
    "Participation",
    "ParticipationStatus",
    "Smoothest",
    "StudentICA",
    "TotalVariation",
    "TwoLosses",
    "UnmixStatus",
    "Unmixing",
    "UserStatus",
    "WindowStatus",
    "agreeing_rows",
    "back_substitute",
    "cosine",
    "decode_mixtures",
    "disaggregate",
    "exact_batch",
    "feature_cosine",
    "feature_error",
    "first_guess",
    "identifiable_users",
    "interpolated_midpoint",
    "invert_dense",
    "invert_features",
    "invert_single",
    "label_counts",
    "match_gradients",
    "midpoint",
    "nonlocal_means",
    "numerical_rank",
    "published_inversion",
    "recover_participation",
    "reduce_mixture",
    "smoothest_means",
    "softened_midpoint",
    "sole_label",
    "solve_output_layer",
    "squared_error",
    "unique_labels",
    "unmix",
]
