"""How counts are released: within the true range of each way, and with the likelihood that attackers are told."""

from __future__ import annotations

import math

import pytest
import torch

from fedprism import defenses
from fedprism.defenses import (
    COUNT_RELEASES,
    BlurredCounts,
    CountRelease,
    GeometricCounts,
    LaplaceCounts,
    NormalCounts,
    RandomWeights,
    RoundedCounts,
    WithheldCounts,
)
from fedprism.errors import BadInput

EVERY: dict[str, CountRelease] = {
    "exact": CountRelease(),
    "withheld": WithheldCounts(0.5),
    "blurred": BlurredCounts(2),
    "rounded": RoundedCounts(5),
    "laplace": LaplaceCounts(1.0),
    "geometric": GeometricCounts(1.0),
    "normal": NormalCounts(1.0),
}


def released(release: CountRelease, true: int, number: int = 20_000) -> torch.Tensor:
    counts = torch.full((number, 1), true)
    return release.release(counts, torch.tensor([10]), torch.Generator().manual_seed(0))[:, 0]


def test_every_release_is_tried_and_evaluates_back() -> None:
    assert {name: type(release) for name, release in EVERY.items()} == COUNT_RELEASES
    for release in EVERY.values():
        assert eval(repr(release), vars(defenses)) == release


@pytest.mark.parametrize("name", EVERY)
def test_the_true_count_is_likely_on_average(name: str) -> None:
    """The expected log-likelihood is highest at the truth, whatever the release."""
    release = EVERY[name]
    reports = released(release, 4)
    reports = reports[torch.isfinite(reports)]
    likelihoods = [
        float(release.log_likelihood(reports, torch.full_like(reports, true)).clamp(min=-100).mean())
        for true in range(11)
    ]
    assert max(likelihoods) == likelihoods[4]


def test_noise_has_the_size_that_it_says() -> None:
    assert float((released(LaplaceCounts(0.5), 4) - 4).abs().mean()) == pytest.approx(2, rel=0.05)
    assert float((released(NormalCounts(2.0), 4) - 4).std()) == pytest.approx(2, rel=0.05)
    whole = released(GeometricCounts(1.0), 4)
    assert torch.equal(whole, whole.round())
    shares = [float((whole == value).double().mean()) for value in (4, 5, 6)]
    assert shares[0] / shares[1] == pytest.approx(math.e, rel=0.1)
    assert shares[1] / shares[2] == pytest.approx(math.e, rel=0.1)
    assert float(released(WithheldCounts(0.3), 4).isnan().double().mean()) == pytest.approx(0.3, abs=0.02)


def test_rounded_and_blurred_counts_stay_near() -> None:
    assert released(RoundedCounts(5), 4, 1).tolist() == [5]
    assert set(released(BlurredCounts(2), 1).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: WithheldCounts(1.5),
        lambda: BlurredCounts(0),
        lambda: RoundedCounts(-1),
        lambda: LaplaceCounts(0.0),
        lambda: NormalCounts(float("nan")),
        lambda: RandomWeights(0.0),
        lambda: RandomWeights(2.0),
    ],
)
def test_strengths_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(BadInput):
        wrong()  # type: ignore[operator]


def test_weights_change_the_length_of_updates_only() -> None:
    update = {"w": torch.randn(100), "steps": torch.tensor([3])}
    weighted = RandomWeights(0.5).on_update(update, defenses.Context(), torch.Generator().manual_seed(0))
    ratio = weighted["w"] / update["w"]
    assert float(ratio.std()) < 1e-5
    assert 0.5 <= float(ratio[0]) <= 1.5
    assert torch.equal(weighted["steps"], update["steps"])
