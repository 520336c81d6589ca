"""The accountant against exact curves, an independent integral, an independent implementation, and the noise itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

import fedprism as fp
from fedprism.defenses import Context, DpSgd, accounting

# (rate, noise, steps, epsilon at delta 1e-5), from the Rényi accountant of Opacus 1.6.0 with its default orders.
OPACUS = [
    (0.01, 1.0, 1000, 2.1013652716430564),
    (0.01, 1.1, 10000, 5.63199236854841),
    (128 / 12000, 0.8, 1000, 3.9161228845378644),
    (0.5, 2.0, 50, 10.277893380848077),
    (0.1, 0.5, 1, 7.3552727600633805),
    (0.001, 4.0, 100000, 0.29665596224702134),
    (0.01, 0.3, 10, 18.429453859923335),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "expected"), OPACUS)
def test_sampled_runs_agree_with_an_independent_accountant(
    rate: float, noise: float, steps: int, expected: float
) -> None:
    found = accounting.epsilon(noise, steps=steps, rate=rate)
    # More orders are tried here, so a little less is possible; more would be a mistake.
    assert expected * (1 - 1e-3) <= found <= expected * (1 + 1e-6)


# (noise, steps, epsilon at delta 1e-5) without sampling, from the privacy loss distributions of dp-accounting 0.6.0.
DP_ACCOUNTING = [(1.0, 1, 4.377178), (2.0, 9, 7.051413), (1.0, 30, 37.622457), (5.0, 1, 0.725522)]


@pytest.mark.parametrize(("noise", "steps", "expected"), DP_ACCOUNTING)
def test_runs_without_sampling_agree_with_privacy_loss_distributions(noise: float, steps: int, expected: float) -> None:
    assert accounting.epsilon(noise, steps=steps) == pytest.approx(expected, abs=2e-6)
    assert DpSgd(noise).epsilon(steps=steps) == accounting.epsilon(noise, steps=steps)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.02, 1.3, 700), (0.2, 3.0, 20), (1.0, 2.0, 9), (1.0, 5.0, 1)])
def test_opacus_says_the_same_where_it_is_installed(rate: float, noise: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    expected = accountant.get_epsilon(delta=1e-5)
    found = accounting.epsilon(noise, steps=steps, rate=rate)
    # Without sampling ours is exact, where Rényi orders leave a little on top.
    assert expected * (0.999 if rate < 1 else 0.85) <= found <= expected * (1 + 1e-6)


@pytest.mark.parametrize("noise", [0.1, 0.7, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_one_release_lies_on_the_exact_curve(noise: float, delta: float) -> None:
    found = accounting.epsilon(noise, delta=delta)
    assert found >= 0

    def density(z: float) -> float:  # of what the likelihood ratio gains on exp(epsilon), by definition of delta
        return max(norm.pdf(z, 1, noise) - math.exp(found + norm.logpdf(z, 0, noise)), 0.0)

    if found == 0:
        assert accounting.gaussian_delta(noise, 0.0) <= delta
        return
    edge = noise**2 * found + 0.5
    total = quad(density, edge, edge + 40 * noise, epsabs=0, epsrel=1e-9, limit=200)[0]
    assert total == pytest.approx(delta, rel=1e-5)


def test_known_values_of_the_gaussian_mechanism() -> None:
    # With noise 1 and epsilon 0, delta is the total variation distance of N(0, 1) and N(1, 1): 2 Φ(1/2) - 1.
    assert accounting.gaussian_delta(1.0, 0.0) == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-12)
    # Where the classical bound holds (epsilon below 1) it is never better.
    for noise in (5.0, 10.0, 50.0):
        classical = math.sqrt(2 * math.log(1.25e5)) / noise
        assert classical < 1
        assert accounting.epsilon(noise) < classical


def test_many_releases_are_one_with_less_noise() -> None:
    assert accounting.epsilon(5.0, steps=25) == pytest.approx(accounting.epsilon(1.0), rel=1e-9)
    # Rényi composition, which is not exact, may not promise less.
    orders = accounting.ORDERS
    loose = accounting.rdp_epsilon(orders, 25 * orders / (2 * 5.0**2), 1e-5)
    assert accounting.epsilon(1.0) < loose < 1.15 * accounting.epsilon(1.0)


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.3, 0.7), (0.02, 2.0)])
def test_one_sampled_release_is_bounded_from_below_by_its_exact_curve(rate: float, noise: float) -> None:
    def delta_at(epsilon: float) -> float:
        def gain(z: float) -> float:
            there = (1 - rate) * norm.pdf(z, 0, noise) + rate * norm.pdf(z, 1, noise)
            return max(there - math.exp(epsilon) * norm.pdf(z, 0, noise), 0.0)

        return float(quad(gain, 0, 1 + 12 * noise, epsabs=1e-12, limit=400)[0])

    exact = brentq(lambda candidate: delta_at(candidate) - 1e-5, 1e-6, 30)
    # Rényi bounds are loose for a single release of which little gets out.
    assert exact < accounting.epsilon(noise, rate=rate) < 4 * exact


@pytest.mark.parametrize("order", [1.01, 1.5, 2.0, 3.7, 8.0, 33.0])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 0.6), (0.9, 2.0)])
def test_the_series_is_the_integral_it_stands_for(order: float, rate: float, noise: float) -> None:
    z = np.linspace(-15 * noise, order + 15 * noise, 200_001)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * noise**2))
    moment = logsumexp(order * ratio + norm.logpdf(z, 0, noise)) + math.log(z[1] - z[0])
    found = accounting.sampled_gaussian_rdp(noise, rate, np.array([order]))[0]
    assert found * (order - 1) == pytest.approx(moment, rel=1e-6, abs=1e-11)


def test_privacy_falls_with_steps_and_rate_and_rises_with_noise() -> None:
    by_steps = [accounting.epsilon(1.0, steps=steps, rate=0.1) for steps in (1, 10, 100)]
    by_rate = [accounting.epsilon(1.0, steps=10, rate=rate) for rate in (0.01, 0.1, 0.5, 1.0)]
    by_noise = [accounting.epsilon(noise, steps=10, rate=0.1) for noise in (4.0, 2.0, 1.0, 0.5)]
    for values in (by_steps, by_rate, by_noise):
        assert values == sorted(values)
        assert values[0] < values[-1]


def test_without_noise_nothing_is_guaranteed() -> None:
    assert accounting.epsilon(0.0) == math.inf
    assert DpSgd(0.0).epsilon() == math.inf
    assert accounting.epsilon(1e6) == 0.0


def test_the_noise_of_a_defense_gives_what_its_accountant_says() -> None:
    """The best test of whether an example is there, on many noised sums, gains delta over exp(epsilon)."""
    defense, draws, rng = DpSgd(1.0, clip=0.5), 6000, torch.Generator().manual_seed(0)
    there = torch.zeros(4, 2, dtype=torch.float64)
    there[0, 0] = 3.0  # longer than the clip: it moves the sum by exactly 0.5
    sums = {}
    for name, grads in (("there", there), ("not there", torch.zeros_like(there))):
        noised = [defense.on_examples({"w": grads}, Context(), rng)["w"].mean(0)[0] * 4 for _ in range(draws)]
        sums[name] = torch.stack(noised)
    for delta in (0.05, 0.2, 0.35):
        epsilon = defense.epsilon(delta=delta)
        edge = 0.5 * (epsilon + 0.5)  # where the likelihood ratio is exp(epsilon), in units of the clip
        gain = (sums["there"] > edge).double().mean() - math.exp(epsilon) * (sums["not there"] > edge).double().mean()
        assert float(gain) == pytest.approx(delta, abs=4 * (1 + math.exp(epsilon)) * 0.5 / math.sqrt(draws))


def test_a_run_of_the_defense_counts_its_releases() -> None:
    defense = DpSgd(2.0, clip=0.1)
    assert defense.epsilon() == accounting.epsilon(2.0)
    assert defense.epsilon(steps=9, delta=1e-6) == accounting.epsilon(2.0, steps=9, delta=1e-6)
    assert defense.epsilon(steps=9, rate=0.1) < defense.epsilon(steps=9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise": -1.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"noise": True}, "noise"),
        ({"noise": 1.0, "delta": 0.0}, "delta"),
        ({"noise": 1.0, "delta": 1.0}, "delta"),
        ({"noise": 1.0, "rate": 0.0}, "rate"),
        ({"noise": 1.0, "rate": 1.5}, "rate"),
        ({"noise": 1.0, "steps": 0}, "the number of releases"),
        ({"noise": 1.0, "steps": 2.5}, "the number of releases"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(fp.errors.BadInput, match=f"^{words} must be .*, not .*[.]$"):
        accounting.epsilon(**settings)  # type: ignore[arg-type]
