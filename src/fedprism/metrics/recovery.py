"""How often an attack succeeds: the share of trials that recover something, and how sure that share is.

Eloul et al., "Enhancing privacy against inversion attacks in federated learning by using mixing gradients strategies",
2022: a trial is one batch attacked once, and succeeds if any image of the batch comes back below the threshold. The
interval is that of Wilson, "Probable inference, the law of succession, and statistical inference", 1927: unlike the
usual plus or minus two standard errors it is of use for ten trials, and for none or all of them successful.

Differs from the paper in: a blank image can be asked to be beaten as well (`floor`).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor


class RecoveryRate(NamedTuple):
    rate: float
    low: float
    high: float
    successes: int
    trials: int


def recovery_rate(
    scores: Tensor,
    threshold: float,
    *,
    floor: Tensor | None = None,
    higher_is_better: bool = False,
    confidence: float = 0.95,
) -> RecoveryRate:
    """The share of trials with a score better than `threshold`, and its confidence interval.

    `scores` are (trials,), or (trials, images), of which the best image counts. A score of NaN, no answer, is no
    recovery. `floor`, of the same shape, is what a blank image scores: an image that does not beat it too is not
    recovered, however good its score.
    """
    if not isinstance(scores, Tensor):
        raise ValueError(f"expected scores as a tensor, found {type(scores).__name__}; convert them with torch.tensor.")
    if scores.ndim not in (1, 2) or len(scores) == 0 or not scores.is_floating_point():
        raise ValueError(
            f"expected floating-point scores (trials,) or (trials, images) of at least one trial, found {scores.dtype} "
            f"of shape {tuple(scores.shape)}; give one row a trial."
        )
    if math.isnan(threshold):
        raise ValueError("expected a threshold to compare scores with, found NaN; give a number.")
    if floor is not None and floor.shape != scores.shape:
        raise ValueError(
            f"expected a floor for every score, of shape {tuple(scores.shape)}, found {tuple(floor.shape)}; "
            "give the score of a blank image against each source."
        )
    bound = torch.full_like(scores, threshold)
    if floor is not None:
        bound = torch.maximum(bound, floor.to(bound)) if higher_is_better else torch.minimum(bound, floor.to(bound))
    better = scores > bound if higher_is_better else scores < bound
    recovered = better if better.ndim == 1 else better.any(1)
    successes, trials = int(recovered.sum()), len(recovered)
    return RecoveryRate(successes / trials, *wilson(successes, trials, confidence), successes, trials)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval that holds the true rate with this confidence: all rates p with |rate - p| <= z sqrt(p(1-p)/n)."""
    if not (0 <= successes <= trials and trials > 0 and 0 < confidence < 1):
        raise ValueError(
            f"expected 0 <= successes <= trials, at least one trial and a confidence between 0 and 1, found "
            f"{successes}, {trials} and {confidence}; correct these."
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, shrunk = successes / trials, z * z / trials
    middle = (rate + shrunk / 2) / (1 + shrunk)
    reach = math.sqrt(rate * (1 - rate) * shrunk + shrunk * shrunk / 4) / (1 + shrunk)
    # At the ends the interval reaches 0 and 1 exactly; rounding must not carry it past them.
    low = 0.0 if successes == 0 else max(0.0, middle - reach)
    return low, 1.0 if successes == trials else min(1.0, middle + reach)
