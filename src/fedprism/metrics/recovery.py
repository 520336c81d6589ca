"""How often an attack succeeds: the fraction of trials that recover something, and how certain that fraction is.

Eloul et al., "Enhancing privacy against inversion attacks in federated learning by using mixing gradients strategies",
2022: a trial is one batch attacked once, and succeeds if any image of the batch comes back below the threshold.

Differs from the paper in: a blank image can be asked to be beaten as well (`floor`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .avd import THRESHOLD_STRICT, avd, avd_floor
from .image import mse

THRESHOLD_PIXELS = 0.01
"""Mean squared error below which an image counts as recovered by its pixels, 20 dB; the paper does not name its own."""
CONFIDENCE = 0.95
"""Probability with which the interval holds the true rate."""


def recovered_edges(reconstruction: Tensor, source: Tensor) -> Tensor:
    """1 for each image whose AVD is below 0.6 and below that of a blank image, else 0: (N, C, H, W) -> (N,)."""
    distance = avd(reconstruction, source)
    return ((distance < THRESHOLD_STRICT) & (distance < avd_floor(source))).to(distance.dtype)


def recovered_pixels(reconstruction: Tensor, source: Tensor) -> Tensor:
    """1 for each sample whose mean squared error is below 0.01, else 0: (N, ...) -> (N,)."""
    error = mse(reconstruction, source)
    return (error < THRESHOLD_PIXELS).to(error.dtype)


class RecoveryRate(NamedTuple):
    rate: float
    low: float
    high: float
    successes: int
    trials: int


def recovery_rate(
    scores: Tensor, threshold: float, *, floor: Tensor | None = None, higher_is_better: bool = False
) -> RecoveryRate:
    """The fraction of trials with a score better than `threshold`, and its 95 % confidence interval.

    `scores` are (trials,), or (trials, images), of which the best image counts; NaN is no recovery. `floor`, of the
    same shape, is what a blank image scores, which has to be beaten too.
    """
    if not isinstance(scores, Tensor):
        raise ValueError(f"scores must be a tensor, not {type(scores).__name__}. Convert them with torch.tensor.")
    if scores.ndim not in (1, 2) or len(scores) == 0 or not scores.is_floating_point():
        raise ValueError(
            "scores must be floating-point, (trials,) or (trials, images) of at least one trial, not "
            f"{scores.dtype} of shape {tuple(scores.shape)}."
        )
    if math.isnan(threshold):
        raise ValueError("the threshold must be a number, not NaN.")
    if floor is not None and floor.shape != scores.shape:
        raise ValueError(
            f"floor must have the shape of the scores, {tuple(scores.shape)}, not {tuple(floor.shape)}. "
            "Give the score of a blank image against each source."
        )
    better = torch.gt if higher_is_better else torch.lt
    recovered = better(scores, threshold)
    if floor is not None:
        recovered &= better(scores, floor)
    successes, trials = int(recovered.view(len(scores), -1).any(1).sum()), len(scores)
    return RecoveryRate(successes / trials, *wilson(successes, trials), successes, trials)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's interval for a rate, which also holds for few trials and for none or all of them successful."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)
