"""Label recovery with planted labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprism.solvers import LabelStatus, label_counts, sole_label, unique_labels
from fedprism.solvers.closed_form.labels import ONE_MORE, sample_unit


def bias_gradient(labels: torch.Tensor, classes: int, spread: float = 0.1, seed: int = 0) -> torch.Tensor:
    """Mean of softmax minus one-hot, for an untrained network's nearly uniform predictions."""
    rng = torch.Generator().manual_seed(seed)
    predicted = torch.softmax(spread * torch.randn(len(labels), classes, generator=rng, dtype=torch.float64), dim=1)
    return (predicted - torch.nn.functional.one_hot(labels, classes)).mean(0)


@given(batch=st.integers(1, 25), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_unique_labels_are_found_when_classes_are_many(batch: int, seed: int) -> None:
    labels = torch.randperm(200, generator=torch.Generator().manual_seed(seed))[:batch]
    gradient = bias_gradient(labels, 200, seed=seed)
    assert torch.equal(unique_labels(gradient).labels, labels.sort().values)
    answer = label_counts(gradient, batch)
    assert torch.equal(answer.labels, labels.sort().values)
    assert answer.status is LabelStatus.TRUSTED


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_repeated_labels_are_counted(seed: int) -> None:
    labels = (
        torch.randint(100, (20,), generator=torch.Generator().manual_seed(seed)) // 9
    )  # few classes, often repeated
    answer = label_counts(bias_gradient(labels, 100, seed=seed), 20)
    assert torch.equal(answer.counts, torch.bincount(labels, minlength=100))
    assert torch.equal(answer.labels, labels.sort().values)


def test_row_sums_of_weights_serve_without_a_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([3, 7, 7, 42])
    signals = torch.full((4, 100), 0.01) - torch.nn.functional.one_hot(labels, 100)
    features = torch.rand(4, 30, generator=rng)
    assert torch.equal(label_counts((signals.T @ features / 4).sum(1), 4).labels, labels)


def test_an_estimate_of_the_prediction_counts_a_crowded_batch() -> None:
    labels = torch.randint(10, (40,), generator=torch.Generator().manual_seed(1))
    gradient = bias_gradient(labels, 10, spread=0.02)
    answer = label_counts(gradient, 40, probabilities=torch.full((10,), 0.1))
    assert torch.equal(answer.counts, torch.bincount(labels, minlength=10))
    assert answer.status is LabelStatus.ESTIMATED
    for factor in (1e-6, 3.0, 1e6):
        scaled = label_counts(factor * gradient, 40, probabilities=torch.full((10,), 0.1))
        assert torch.equal(scaled.counts, answer.counts)


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_estimate_talks_a_class_out_of_samples_that_are_certain(seed: int, batch: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (batch,), generator=rng)
    gradient = bias_gradient(labels, 10, spread=2.0, seed=seed)
    wild = torch.softmax(4 * torch.randn(10, generator=rng, dtype=torch.float64), dim=0)
    answer = label_counts(gradient, batch, probabilities=wild, scale=1.0)
    assert int(answer.counts.sum()) == batch
    certain = answer.counts + ONE_MORE >= -batch * gradient
    assert bool(certain.all()), "predictions are not negative"


def test_counts_always_add_up_to_the_batch() -> None:
    for seed in range(20):
        noise = torch.randn(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for estimate in (None, torch.full((10,), 0.1)):
            assert int(label_counts(noise, 7, probabilities=estimate).counts.sum()) == 7


@pytest.mark.parametrize(
    ("batch", "loss", "status"),
    [
        (3, "mse", LabelStatus.UNKNOWN_LOSS),
        (None, "cross_entropy", LabelStatus.PRESENCE_ONLY),
        (8, "cross_entropy", LabelStatus.CROWDED),
    ],
)
def test_says_when_the_rule_cannot_be_trusted(batch: int | None, loss: str, status: LabelStatus) -> None:
    labels = torch.arange(8)[: batch or 3]
    answer = label_counts(bias_gradient(labels, 10), batch, loss=loss)
    assert answer.status is status
    assert (loss == "mse") == (len(answer.labels) == 0)


def test_noise_that_makes_every_class_negative_is_noticed() -> None:
    assert label_counts(-torch.ones(100), 3).status is LabelStatus.INCONSISTENT


@given(seed=st.integers(0, 10**6), batch=st.integers(2, 40), confident=st.floats(0.1, 4.0))
@settings(max_examples=60, deadline=None)
def test_one_class_is_told_from_several_by_the_rows_of_the_weight_gradient(
    seed: int, batch: int, confident: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    features = torch.relu(torch.randn(batch, 200, generator=rng))
    predicted = torch.softmax(confident * torch.randn(batch, 10, generator=rng), dim=1)
    labels = torch.randint(10, (batch,), generator=rng)
    for of_all in (torch.full_like(labels, 3), labels):
        gradient = (predicted - torch.nn.functional.one_hot(of_all, 10)).T @ features / batch
        shared = len(set(of_all.tolist())) == 1
        assert sole_label(gradient) == (int(of_all[0]) if shared else None)
    noise = torch.randn(10, 200, generator=rng)
    assert sole_label(gradient + noise) is None


@pytest.mark.parametrize("seed", range(20))
def test_under_noise_the_counts_still_add_up_to_the_batch(seed: int) -> None:
    """A scale at which every gap rounds to no sample at all leaves the smallest distances to whole numbers."""
    noise = 0.15 * torch.randn(7, generator=torch.Generator().manual_seed(seed))
    gaps = 3 * (torch.tensor([1.0, 1, 1, 1, 1, 1, 0]) + noise)
    unit = sample_unit(gaps, 6, step=1, lacking=torch.zeros(7, dtype=torch.bool), error=1e-3)
    assert unit is not None
    assert unit.size == pytest.approx(3, rel=0.2)
