"""Gradient matching as the papers that `gradient_matching` cites put it together: one configured instance each."""

from __future__ import annotations

from fedprism.attacks.gradient_matching.attack import GradientMatching
from fedprism.attacks.gradient_matching.batchnorm import BatchNorm, Normalise, Pull
from fedprism.attacks.gradient_matching.labels import Labels
from fedprism.attacks.gradient_matching.starts import Starts, uniform_start
from fedprism.naming import preset
from fedprism.solvers.matching.distances import Distance, cosine, squared_error
from fedprism.solvers.matching.gradients import LBFGS
from fedprism.solvers.matching.objective import Prior
from fedprism.solvers.matching.priors import Orthogonality, TotalVariation

GRADATTACK = (TotalVariation(0.05),)
"""The published weight of total variation of attacks on batch norm; where something is pulled, that has 0.001."""


def _mixing(distance: Distance, *priors: Prior) -> GradientMatching:
    return GradientMatching(
        distance=distance,
        priors=priors,
        labels=Labels.JOINT,
        optimizer=LBFGS(),
        start=uniform_start,
        lr=0.05,
        iterations=550,
    )


@preset(GradientMatching)
def dlg() -> GradientMatching:
    """Deep leakage from gradients: squared distance, labels optimised jointly, L-BFGS."""
    return GradientMatching(
        distance=squared_error,
        labels=Labels.JOINT,
        optimizer=LBFGS(line_search=True),
        lr=1.0,
        iterations=300,
        tolerance=1e-9,
    )


@preset(GradientMatching)
def idlg() -> GradientMatching:
    """Improved DLG: the label is read off the last layer first."""
    return dlg(labels=Labels.INFERRED)


@preset(GradientMatching)
def inverting_gradients() -> GradientMatching:
    """Inverting gradients: cosine distance, total variation, signed Adam in the pixel box, three starts that race."""
    return GradientMatching(priors=(TotalVariation(1e-3),), iterations=4800, starts=Starts(restarts=3, race=0.1))


@preset(GradientMatching)
def bn_exact() -> GradientMatching:
    """Inverting gradients, given the private statistics: the guess keeps its own, drawn towards the exact ones."""
    return inverting_gradients(priors=GRADATTACK, batchnorm=BatchNorm(normalise=Normalise.OWN, pull=Pull.EXACT))


@preset(GradientMatching)
def bn_infer() -> GradientMatching:
    """Inverting gradients, guessing the private statistics: the guess keeps its own, drawn towards the running ones."""
    return inverting_gradients(priors=GRADATTACK, batchnorm=BatchNorm(normalise=Normalise.OWN, pull=Pull.RUNNING))


@preset(GradientMatching)
def bn_proxy() -> GradientMatching:
    """Inverting gradients, with the running statistics in place of the private ones."""
    return inverting_gradients(priors=GRADATTACK, batchnorm=BatchNorm(normalise=Normalise.RUNNING))


@preset(GradientMatching)
def mixing_l2() -> GradientMatching:
    """First attack of the mixing-gradients paper: squared distance."""
    return _mixing(squared_error)


@preset(GradientMatching)
def mixing_angle() -> GradientMatching:
    """Second attack of the mixing-gradients paper: angle and total variation."""
    return _mixing(cosine, TotalVariation(1e-4))


@preset(GradientMatching)
def mixing_orthogonal() -> GradientMatching:
    """Third attack of the mixing-gradients paper: angle, total variation and input orthogonality."""
    return _mixing(cosine, TotalVariation(1e-4), Orthogonality(1e-4))
