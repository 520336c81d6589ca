"""The study of direct inversion: its batches, its readings with planted answers, and a small run of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import fedprism as fp
from fedprism_papers import Measured, Settings
from fedprism_papers.mixing_gradients import direct
from fedprism_papers.mixing_gradients.direct import (
    ANSWERED,
    COMMON,
    DIVIDED,
    EQUAL,
    ERROR,
    GOOD,
    MEAN,
    PUBLISHED,
    RANDOM,
    REFERRED,
    UNIQUE,
    Case,
    Layer,
    reading,
)

SMALL = Settings(quick=True, sizes=(4,), batches=1)


@pytest.fixture(scope="module")
def layer(photos: fp.data.ImageSet) -> Layer:
    return Layer(data=photos, classes=50)


def test_batches_have_the_labels_they_are_named_for(layer: Layer, rng: torch.Generator) -> None:
    sizes = dict.fromkeys((UNIQUE, RANDOM, EQUAL), 0)
    for kind in sizes:
        batch = layer.draw(8, kind, rng)
        assert batch is not None
        assert int(batch.labels.max()) < 50
        sizes[kind] = len(set(batch.labels.tolist()))
    assert sizes[UNIQUE] == 8
    assert sizes[EQUAL] == 1
    assert layer.draw(9, UNIQUE, rng) is None  # of eight classes
    assert layer.draw(65, EQUAL, rng) is None  # 64 images a class


def test_the_published_weights_are_uniform(layer: Layer) -> None:
    weights = layer.model(PUBLISHED, 0).state_dict()["1.weight"]
    assert 0.49 < float(weights.max()) < 0.5
    assert float(weights.std()) == pytest.approx(12**-0.5, rel=0.01)
    assert float(layer.model(COMMON, 0).state_dict()["1.weight"].max()) < 0.02


def planted() -> tuple[torch.Tensor, torch.Tensor, fp.Batch]:
    """Two images, classes 0 and 1 of three, that share a background in every row."""
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    signals = torch.tensor([[-0.5, 0.0], [0.0, -0.5], [0.0, 0.0]]) + 0.3
    return signals @ images.flatten(1), signals.sum(1), fp.Batch(images, torch.tensor([0, 1]))


def test_the_absent_row_takes_away_what_rows_share() -> None:
    weight_grad, bias_grad, batch = planted()
    mixed, exact = (reading(weight_grad, bias_grad, batch, reference) for reference in (None, 2))
    assert exact.values[ERROR] < 1e-6 < 0.05 < mixed.values[ERROR]
    assert exact.values[GOOD] == 1 > mixed.values[GOOD]
    assert int(exact.counts.sum()) == int(mixed.counts.sum()) == batch.inputs.numel()
    assert int(exact.counts[:6].sum()) == batch.inputs.numel()  # all below 1e-5


def test_a_row_that_cannot_be_divided_is_no_answer() -> None:
    weight_grad, bias_grad, batch = planted()
    bias_grad[1] = 0
    found = reading(weight_grad, bias_grad, batch, None)
    assert found.values[ANSWERED] == 0.5
    assert int(found.counts.sum()) == batch.inputs.numel() // 2


def played(layer: Layer, case: Case) -> dict[str, dict[str, Measured]]:
    """What was read, by loss and by the way of dividing."""
    rows = direct.play(layer, case, SMALL, lambda title: None)
    return {
        str(row.cell["loss"]): {way: entry for way, entry in row.entries.items() if isinstance(entry, Measured)}
        for row in rows
    }


def test_equal_labels_are_answered_with_the_mean(layer: Layer) -> None:
    rows = direct.play(layer, Case(weights=COMMON, size=4, labels=EQUAL), SMALL, lambda title: None)
    assert len(rows) == 3
    for row in rows:
        mean = row.entries[MEAN]
        assert isinstance(mean, float)
        for way in (DIVIDED, REFERRED):
            entry = row.entries[way]
            assert isinstance(entry, Measured)
            assert entry.mean(ERROR) == pytest.approx(mean, rel=0.1)


def test_the_findings(layer: Layer) -> None:
    """Of many classes cross-entropy and softmax + MSE leave every image, raw MSE not; the paper's weights hide that."""
    many = dataclasses.replace(layer, classes=500)
    common, published = (played(many, Case(weights=weights, size=8, labels=UNIQUE)) for weights in (COMMON, PUBLISHED))
    for loss in ("cross-entropy", "softmax + MSE"):
        assert common[loss][DIVIDED].mean(GOOD) == common[loss][REFERRED].mean(GOOD) == 1
    assert common["raw MSE"][DIVIDED].mean(GOOD) < 0.5
    assert published["cross-entropy"][DIVIDED].mean(GOOD) == 1
    assert published["softmax + MSE"][DIVIDED].mean(GOOD) < 0.5


def test_noise_reaches_the_gradient(layer: Layer) -> None:
    clean, noisy = (
        played(layer, Case(weights=COMMON, size=4, labels=UNIQUE, noise=noise))["cross-entropy"][DIVIDED].mean(ERROR)
        for noise in (0.0, 0.01)
    )
    assert clean < 0.5 * noisy


def test_where_no_class_is_absent_there_is_no_row_to_subtract(layer: Layer) -> None:
    full = dataclasses.replace(layer, classes=8)
    found = played(full, Case(weights=COMMON, size=8, labels=UNIQUE))
    assert set(found["cross-entropy"]) == {DIVIDED}


def test_the_full_study_has_every_combination() -> None:
    ways = set(itertools.product((COMMON, PUBLISHED), (UNIQUE, RANDOM, EQUAL)))
    clean = {Case(weights=w, labels=k, size=size) for w, k in ways for size in (1, 2, 4, 8, 16, 32, 64)}
    noisy = {Case(weights=w, labels=k, size=8, noise=noise) for w, k in ways for noise in direct.NOISES}
    assert set(direct.cases(Settings())) == clean | noisy


def test_a_quick_run_has_all_its_rows() -> None:
    rows = list(direct.RECIPE.run(SMALL, lambda title: None))
    combinations = {
        (row.cell["classes"], *(row.cell[k] for k in ("weights", "labels", "noise", "loss"))) for row in rows
    }
    assert len(rows) == len(combinations) == 2 * 2 * 3 * 2 * 3  # classes, weights, labels, noise or none, losses
    assert {row.cell["noise"] for row in rows} == {"none", direct.DRAWN_NOISE}
    assert direct.figure(rows).count("<polyline") == len(rows) * 2  # ways of dividing
    assert direct.figure([]).endswith("</svg>\n")
