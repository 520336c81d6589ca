"""The mathematics: plain functions on tensors that import nothing of fedprism. Numerical failure is a status."""

from .decode import DecodeStatus, Decoding, decode_mixtures
from .denoising import nonlocal_means
from .dense import (
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
from .distances import cosine, squared_error
from .exact_batch import Behind, ExactBatch, ExactStatus, exact_batch
from .features import FeatureInversion, InvertedFeatures, feature_cosine, feature_error, invert_features
from .graphs import Engine, Repeated, Stepping
from .ica import StudentICA, Unmixing, UnmixStatus, unmix
from .labels import LabelRecovery, LabelStatus, label_counts, unique_labels
from .matching import LBFGS, Adam, Matching, MatchingStatus, match_gradients
from .mixture import Mixture, reduce_mixture
from .participation import (
    Identifiability,
    IdentifiabilityStatus,
    Participation,
    ParticipationStatus,
    UserStatus,
    disaggregate,
    identifiable_users,
    recover_participation,
)
from .priors import (
    BatchMoments,
    Moments,
    Orthogonality,
    TotalVariation,
    channel_moments,
    moments_distance,
    orthogonality,
    total_variation,
)
from .published import CocktailObjective, embedding_objective
from .trials import Trials, TrialStatus, match_trials
from .windows import Lattice, Smoothest, WindowStatus, midpoint, smoothest_means, softened_midpoint

__all__ = [
    "LBFGS",
    "Adam",
    "BatchMoments",
    "Behind",
    "CocktailObjective",
    "DecodeStatus",
    "Decoding",
    "DenseInversion",
    "DenseStatus",
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
    "MatchingStatus",
    "Mixture",
    "Moments",
    "Orthogonality",
    "OutputLayerSolution",
    "Participation",
    "ParticipationStatus",
    "Repeated",
    "Smoothest",
    "Stepping",
    "StudentICA",
    "TotalVariation",
    "TrialStatus",
    "Trials",
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
    "identifiable_users",
    "invert_dense",
    "invert_features",
    "invert_single",
    "label_counts",
    "match_gradients",
    "match_trials",
    "midpoint",
    "moments_distance",
    "nonlocal_means",
    "numerical_rank",
    "orthogonality",
    "recover_participation",
    "reduce_mixture",
    "smoothest_means",
    "softened_midpoint",
    "solve_output_layer",
    "squared_error",
    "total_variation",
    "unique_labels",
    "unmix",
]
