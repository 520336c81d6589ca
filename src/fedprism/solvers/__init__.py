"""The mathematics: plain functions on tensors that import nothing of fedprism. Numerical failure is a status."""

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
from .labels import LabelRecovery, LabelStatus, label_counts, unique_labels
from .matching import LBFGS, Adam, Matching, MatchingStatus, cosine, match_gradients, squared_error
from .priors import Orthogonality, TotalVariation, orthogonality, total_variation

__all__ = [
    "LBFGS",
    "Adam",
    "DenseInversion",
    "DenseStatus",
    "LabelRecovery",
    "LabelStatus",
    "Matching",
    "MatchingStatus",
    "Orthogonality",
    "OutputLayerSolution",
    "TotalVariation",
    "agreeing_rows",
    "back_substitute",
    "cosine",
    "invert_dense",
    "invert_single",
    "label_counts",
    "match_gradients",
    "numerical_rank",
    "orthogonality",
    "solve_output_layer",
    "squared_error",
    "total_variation",
    "unique_labels",
]
