"""What an attacker can do with an observation. `ATTACKS` maps each name to a function that returns the attack."""

from __future__ import annotations

from collections.abc import Callable

from fedprism.attacks.base import Attack, PerClient, Reduction, Then, then
from fedprism.attacks.dense_inversion import DenseInversion, dense_inversion
from fedprism.attacks.gradient_matching import (
    GradientMatching,
    Labels,
    dlg,
    gaussian_start,
    idlg,
    inverting_gradients,
    mixing_angle,
    mixing_l2,
    mixing_orthogonal,
    uniform_start,
)
from fedprism.solvers.matching import LBFGS, Adam, cosine, squared_error
from fedprism.solvers.priors import Orthogonality, TotalVariation

ATTACKS: dict[str, Callable[[], Attack]] = {
    "dense-inversion": dense_inversion,
    "gradient-matching": GradientMatching,
    "dlg": dlg,
    "idlg": idlg,
    "inverting-gradients": inverting_gradients,
    "mixing-l2": mixing_l2,
    "mixing-angle": mixing_angle,
    "mixing-orthogonal": mixing_orthogonal,
}

__all__ = [
    "ATTACKS",
    "LBFGS",
    "Adam",
    "Attack",
    "DenseInversion",
    "GradientMatching",
    "Labels",
    "Orthogonality",
    "PerClient",
    "Reduction",
    "Then",
    "TotalVariation",
    "cosine",
    "dense_inversion",
    "dlg",
    "gaussian_start",
    "idlg",
    "inverting_gradients",
    "mixing_angle",
    "mixing_l2",
    "mixing_orthogonal",
    "squared_error",
    "then",
    "uniform_start",
]
