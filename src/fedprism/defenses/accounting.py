"""What Gaussian noise guarantees: (epsilon, delta) of one release and of a whole run.

Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018 (theorem 8: the exact curve);
Mironov, "Rényi Differential Privacy", CSF 2017 (composition); Mironov, Talwar, Zhang, "Rényi Differential Privacy of
the Sampled Gaussian Mechanism", 2019 (section 3.3: every order); Canonne, Kamath, Steinke, "The Discrete Gaussian for
Differential Privacy", NeurIPS 2020 (arXiv 2004.00010, fourth version, proposition 12:
from Rényi to epsilon).

Plain functions on numbers. `noise` is always the noise multiplier: the standard deviation of the noise on the sum, in
units of what one participant can move the sum by. Neighbours differ by one participant who is there or is not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, gammasgn, log_ndtr, logsumexp

from fedprism.checks import probability, whole
from fedprism.defenses.base import check_number

ORDERS = np.concatenate(
    [np.arange(1.01, 1.1, 0.01), np.arange(1.1, 11, 0.1), np.arange(11, 64), 2.0 ** np.arange(6, 11)]
)
"""The Rényi orders that are tried; the best of them gives epsilon."""

MOST_STEPS = 10**9
"""Releases accounted for at most: a bound on input."""
_TERMS = 2000
"""Terms of the series for one order; they fall off faster than 1 / i²."""


def epsilon(noise: float, *, delta: float = 1e-5, steps: int = 1, rate: float = 1.0) -> float:
    """The epsilon at `delta` of `steps` releases with fresh noise, each of which may depend on the ones before.

    `rate`: each participant is in each release with this probability, by a secret coin toss; below 1 the answer is an
    upper bound. For batches of a shuffled data set `rate` is 1, `steps` the number of epochs, and the answer exact.
    """
    check_number(noise, "noise", "1.0 is common", zero=True)
    check_number(delta, "delta", "take one well below 1 / (number of participants)")
    probability(delta, "delta")
    check_number(rate, "rate", "it is the chance with which a participant is in a release", most=1.0)
    whole(steps, "the number of releases", MOST_STEPS)
    if noise == 0:
        return math.inf
    if rate == 1:
        return gaussian_epsilon(noise / math.sqrt(steps), delta)
    rdp = steps * sampled_gaussian_rdp(noise, rate, ORDERS)
    return rdp_epsilon(ORDERS, rdp, delta)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """The smallest delta with which one release of the Gaussian mechanism is (epsilon, delta)-private, exactly."""
    half = 0.5 / noise
    # Φ(1/2σ - εσ) - exp(ε) Φ(-1/2σ - εσ), from logarithms because both may be tiny and exp(ε) huge.
    first = log_ndtr(half - epsilon * noise)
    second = epsilon + log_ndtr(-half - epsilon * noise)
    return float(np.exp(first) * -np.expm1(min(second - first, 0.0)))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The smallest epsilon with which one release of the Gaussian mechanism is (epsilon, delta)-private, exactly."""
    if gaussian_delta(noise, 0.0) <= delta:
        return 0.0
    # With log(1/δ) = l, Rényi composition gives 1/2σ² + sqrt(2 l)/σ: never below the exact value.
    highest = 0.5 / noise**2 + math.sqrt(2 * math.log(1 / delta)) / noise
    return float(brentq(lambda candidate: gaussian_delta(noise, candidate) - delta, 0.0, highest, xtol=1e-12))


def sampled_gaussian_rdp(noise: float, rate: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Rényi divergence of one release at each order above 1, where participants are there with chance `rate`."""
    return np.array([_log_moment(noise, rate, order) / (order - 1) for order in orders])


def rdp_epsilon(orders: NDArray[np.float64], rdp: NDArray[np.float64], delta: float) -> float:
    """The best epsilon at `delta` that Rényi divergences `rdp` at these orders give."""
    candidates = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(max(candidates.min(), 0.0))


def _log_moment(noise: float, rate: float, order: float) -> float:
    """log E[((1 - q) + q exp((2z - 1) / 2σ²))^order], z ~ N(0, σ²): a binomial series either side of equal summands."""
    i = np.arange(_TERMS, dtype=np.float64)
    binomial, sign = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1), gammasgn(order - i + 1)
    used = np.isfinite(binomial) & (sign != 0)
    i, binomial, sign = i[used], binomial[used], sign[used]
    equal = noise**2 * math.log(1 / rate - 1) + 0.5
    below = _side(noise, rate, order, i) + log_ndtr((equal - i) / noise)
    above = _side(noise, rate, order, order - i) + log_ndtr((order - i - equal) / noise)
    moment = logsumexp(np.concatenate([binomial + below, binomial + above]), b=np.concatenate([sign, sign]))
    return float(max(moment, 0.0))


def _side(noise: float, rate: float, order: float, power: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of (1 - q)^(order - power) q^power E[exp(power (2z - 1) / 2σ²)]."""
    mixed: NDArray[np.float64] = (order - power) * math.log1p(-rate) + power * math.log(rate)
    return mixed + power * (power - 1) / (2 * noise**2)
