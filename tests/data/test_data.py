"""The embedded pictures are really there, batches are what was asked for, and wrong options are named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.data import DATASETS, ImageSet, load
from fedprism.data.source import spread
from fedprism.errors import BadInput
from planted_pictures import noise, same

# --- embedded ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos() -> ImageSet:
    return load("photos", crops=16)


def test_photos_are_varied_crops_of_every_photograph(photos: ImageSet) -> None:
    assert photos.images.shape == (128, 3, 32, 32)
    assert photos.images.dtype == torch.uint8
    assert photos.labels.tolist() == list(range(8)) * 16
    pixels = photos.images.float()
    assert pixels.mean(1).flatten(1).std(1).min() > 20
    distances = torch.cdist(pixels.flatten(1), pixels.flatten(1)) / 3072**0.5
    assert distances[~torch.eye(128, dtype=torch.bool)].min() > 5


def test_photos_are_deterministic_and_nested(photos: ImageSet) -> None:
    fewer = load("photos", crops=2)
    assert torch.equal(fewer.images, photos.images[:16])
    large = load("photos", crops=1, size=64)
    shrunk = torch.nn.functional.avg_pool2d(large.images.float(), 2)
    assert (shrunk - photos.images[:8].float()).abs().mean() < 6


def test_photos_show_the_photograph_they_name(photos: ImageSet) -> None:
    from skimage.data import astronaut

    whole = torch.from_numpy(astronaut()).permute(2, 0, 1).float()
    assert photos.class_names[0] == "astronaut"
    assert (torch.nn.functional.avg_pool2d(whole, 16) - photos.images[0].float()).abs().mean() < 6


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert same(digits, np.rint(load_digits().images * 255 / 16).astype(np.uint8), load_digits().target.tolist())
    assert digits.classes == 10
    assert load("digits", size=28).images.shape == (1797, 1, 28, 28)


# --- batches ----------------------------------------------------------------------------------------------------


def test_batch_is_float_in_unit_range(photos: ImageSet) -> None:
    batch = photos.batch([3, 0])
    assert batch.inputs.dtype == torch.float32
    assert torch.equal((batch.inputs * 255).round().byte(), photos.images[[3, 0]])
    assert batch.labels.tolist() == [3, 0]
    assert len(photos.batch(range(4))) == len(photos.batch(torch.arange(4, dtype=torch.int32))) == 4


@pytest.mark.parametrize(
    "indices", [[], [-1], [128], [0.5], [True], torch.tensor(3), torch.ones(128, dtype=torch.bool)]
)
def test_batch_refuses_other_indices(photos: ImageSet, indices: Any) -> None:
    with pytest.raises(BadInput, match="0 to 127"):
        photos.batch(indices)


def test_draw_depends_on_the_generator_alone(photos: ImageSet) -> None:
    first, again, other = (photos.draw(128, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert sorted(first.labels.tolist()) == sorted(photos.labels.tolist())


def test_draw_with_unique_labels(photos: ImageSet) -> None:
    drawn = [photos.draw(5, torch.Generator().manual_seed(seed), unique_labels=True).labels for seed in range(20)]
    assert all(len(labels.unique()) == 5 for labels in drawn)
    assert len(torch.cat(drawn).unique()) == 8


@pytest.mark.parametrize(("count", "unique"), [(129, False), (9, True), (0, False), (True, False), (1.0, False)])
def test_draw_refuses_the_impossible(photos: ImageSet, count: Any, unique: bool) -> None:
    with pytest.raises(BadInput, match="images"):
        photos.draw(count, torch.Generator(), unique_labels=unique)


# --- options and names ------------------------------------------------------------------------------------------


def test_limit_spreads_over_the_classes() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    assert spread(labels, None).tolist() == list(range(7))
    assert spread(labels, 3).tolist() == [0, 4, 6]
    assert spread(labels, 5).tolist() == [0, 1, 4, 5, 6]
    assert spread(labels, 100).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("photo", {}, "did you mean photos"),
        (None, {}, "no data set is called"),
        ("", {}, "no data set is called"),
        ("photos", {"crop": 3}, "'crop'"),
        ("photos", {"crops": True}, "crops"),
        ("photos", {"size": 3}, "size"),
        ("photos", {"size": 10**6}, "size"),
        ("photos", {"size": 4096, "crops": 1000}, "bytes of pixels"),
        ("digits", {"size": "28"}, "size"),
        ("digits", {"size": 4096}, "bytes of pixels"),
        ("mnist", {"split": "validation"}, "test or train"),
        ("mnist", {"split": ["test"]}, "test or train"),
        ("mnist", {"limit": 0}, "limit"),
        ("mnist", {"limit": 1.5}, "limit"),
        ("mnist", {"size": -1}, "size"),
        ("lfw", {"split": "train"}, "all"),
        ("fashion-mnist", {}, "fashion_mnist.npz"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, name: Any, options: dict[str, Any], match: str) -> None:
    np.savez(tmp_path / "mnist.npz", x_test=noise(2, 4, 4), y_test=[0, 1])
    with pytest.raises(BadInput, match=match):
        load(name, data_dir=tmp_path, **options)


def test_missing_data_folder_names_both_ways_to_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    with pytest.raises(BadInput, match=r"cifar10.*--data-dir.*FEDPRISM_DATA"):
        load("cifar10")
    with pytest.raises(BadInput, match=r"no folder at.*--data-dir.*FEDPRISM_DATA"):
        load("cifar10", data_dir=tmp_path / "missing")


@pytest.mark.skipif("FEDPRISM_DATA" not in os.environ, reason="FEDPRISM_DATA names no folder of real data")
@pytest.mark.parametrize("name", DATASETS)
def test_real_data_sets(name: str) -> None:
    options = {} if name in ("photos", "digits") else {"limit": 20, "size": 32}
    try:
        found = load(name, **options)
    except BadInput as missing:
        pytest.skip(str(missing))
    assert found.images.float().std() > 20
    assert len(found.draw(5, torch.Generator().manual_seed(0), unique_labels=True)) == 5


def test_a_seed_is_a_generator_of_its_own(photos: ImageSet) -> None:
    by_seed = photos.draw(8, seed=3)
    assert torch.equal(by_seed.tensor, photos.draw(8, torch.Generator().manual_seed(3)).tensor)
    assert not torch.equal(by_seed.tensor, photos.draw(8, seed=4).tensor)
    for wrong in ({}, {"seed": 0, "rng": torch.Generator()}, {"seed": -1}, {"seed": 0.5}):
        with pytest.raises(BadInput, match="seed"):
            photos.draw(8, **wrong)  # type: ignore[arg-type]
