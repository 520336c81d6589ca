"""How much doubt noise leaves between two updates, and a lower confidence limit of a mean.

`doubt` is 4 E[p (1 - p)] for the posterior probability p of one of two equally likely updates: 1 if what is seen does
not depend on which it was, 0 if it always tells. The squared error of any estimate of a number that is +1/2 or -1/2
is then at least doubt / 4. Assouad, "Deux remarques sur l'estimation", 1983, uses the total variation instead, which
leaves up to 1 dB less.
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq
from torch import Tensor

REACH = 9.0
"""Standard deviations of Gaussian noise that the integral covers; what lies outside weighs 1e-19."""
STEPS = 1801
"""Steps of that integral, at 0.01 standard deviations."""
BETS = 20
"""Stakes between 0 and 1 over which the confidence limit is averaged; 200 change it by less than .001."""


def gaussian_doubt(distance: float) -> float:
    """The doubt about ±distance/2 behind Gaussian noise of standard deviation 1: the mean of 1 - tanh."""
    if not distance < 2 * REACH:
        return 0.0
    half = distance / 2
    noise = torch.linspace(-REACH, REACH, STEPS, dtype=torch.float64)
    weights = torch.exp(-noise.square() / 2)
    return float((weights * (1 - torch.tanh(half * (half + noise)))).sum() / weights.sum())


def laplace_doubt(difference: Tensor) -> float:
    """At least the doubt behind independent Laplace noise of standard deviation 1 on every entry.

    By Cauchy-Schwarz the doubt is no less than the squared Bhattacharyya coefficient, a product over the entries.
    """
    apart = difference.double().abs() * math.sqrt(2)  # in units of the scale, which is the standard deviation / sqrt 2
    return float(torch.exp(2 * (torch.log1p(apart / 2) - apart / 2).sum()))


def exact_doubt(difference: Tensor) -> float:
    """Without noise: 1 if two updates are equal, bit by bit, otherwise 0."""
    return float(not bool(difference.any()))


def lower_mean(values: Tensor, confidence: float) -> float:
    """A limit that the mean of independent values in [0, 1] exceeds with this confidence, whatever their distribution.

    Waudby-Smith, Ramdas, "Estimating means of bounded random variables by betting", 2024: if the mean were m, a gambler
    who stakes a fixed part of the capital on each value would not win; here the capital is averaged over stakes. For
    values of 0 and 1 it comes close to the limit of Clopper and Pearson.
    """
    values = values.double().clamp(0, 1)
    stakes = ((torch.arange(BETS, dtype=torch.float64) + 0.5) / BETS).unsqueeze(1)

    def excess(mean: float) -> float:
        capital = torch.log1p(stakes * (values / mean - 1)).sum(1)
        return float(torch.logsumexp(capital, 0)) - math.log(BETS) + math.log1p(-confidence)

    highest = float(values.mean()) if values.numel() else 0.0
    lowest = highest * 1e-9
    if highest == 0.0 or excess(lowest) <= 0:
        return 0.0
    return float(brentq(excess, lowest, highest))
