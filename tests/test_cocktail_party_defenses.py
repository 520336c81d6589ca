"""The study of defenses against the Cocktail Party Attack, on a small network and the embedded photographs."""

from __future__ import annotations

import math

import pytest
import torch

import fedprism as fp
from fedprism.recipes import Outcome, Row, Settings
from fedprism.recipes import cocktail_party as cpa
from fedprism.recipes import cocktail_party_defenses as study
from fedprism.recipes.measuring import FAITHFUL, PSNR


@pytest.fixture(scope="module")
def rows() -> dict[tuple[object, object], Row]:
    found = study.run(Settings(quick=True, device="cpu"), lambda _: None)
    return {(row.cell["defense"], row.cell["strength"]): row for row in found}


def measured(row: Row, method: str) -> Outcome:
    entry = row.entries[method]
    assert isinstance(entry, Outcome)
    return entry


def test_an_undefended_batch_comes_out_exactly_and_says_so(rows: dict[tuple[object, object], Row]) -> None:
    row = rows["nothing", "plain gradient"]
    assert row.entries[study.CERTIFICATE] == "exact"
    assert measured(row, cpa.OURS).mean(FAITHFUL) == 1
    assert measured(row, cpa.OURS).mean(study.CONFIRMED) == 1
    assert measured(row, cpa.ICA).mean(study.GOOD) == 1
    assert measured(row, cpa.ICA).mean(FAITHFUL) < 1


@pytest.mark.parametrize(
    ("defense", "strength"),
    [
        ("quantization", "8 bits"),
        ("short floats", "bfloat16"),
        ("activation", "Sigmoid"),
        ("dropout", "0.5"),
        ("local training", "10 epochs, rate 0.01"),
    ],
)
def test_what_is_no_protection(rows: dict[tuple[object, object], Row], defense: str, strength: str) -> None:
    row = rows[defense, strength]
    assert measured(row, cpa.OURS).mean(study.GOOD) == 1
    rectified = row.entries[study.CERTIFICATE] != "not rectified"
    assert rectified == (defense != "activation")
    if rectified:
        assert measured(row, cpa.OURS).mean(FAITHFUL) == 1
        assert measured(row, cpa.OURS).mean(PSNR) > measured(row, cpa.ICA).mean(PSNR) + 10


def test_nothing_is_confirmed_where_images_are_lost(rows: dict[tuple[object, object], Row]) -> None:
    confirmed = {name for name, row in rows.items() if measured(row, cpa.OURS).mean(study.CONFIRMED) > 0}
    assert all(measured(rows[name], cpa.OURS).mean(study.GOOD) == 1 for name in confirmed)
    assert ("noise, update of length 1", "0.0001") in confirmed
    assert ("pruning", "90%") not in confirmed


def test_without_bias_the_images_are_there_up_to_contrast(rows: dict[tuple[object, object], Row]) -> None:
    row = rows["first layer", "without bias"]
    assert row.entries[study.CERTIFICATE] == "no bias"
    assert measured(row, cpa.OURS).mean(study.LIKENESS) > 0.98
    assert measured(row, cpa.OURS).mean(FAITHFUL) == 0


@pytest.mark.parametrize(
    ("defense", "strength"), [("noise, update of length 1", "0.01"), ("DP-SGD, clip 1", "noise 0.1")]
)
def test_much_noise_leaves_no_good_image_and_confirms_none(
    rows: dict[tuple[object, object], Row], defense: str, strength: str
) -> None:
    row = rows[defense, strength]
    assert measured(row, cpa.OURS).mean(study.CONFIRMED) == 0
    for method in (cpa.ICA, cpa.OURS):
        assert measured(row, method).mean(study.GOOD) == 0


def test_dp_sgd_leaves_no_more_than_chance(rows: dict[tuple[object, object], Row]) -> None:
    row = rows["DP-SGD, clip 1", "noise 0.1"]
    chance = measured(row, study.STRANGERS).mean(study.LIKENESS)
    for method in (cpa.ICA, cpa.OURS):
        assert measured(row, method).mean(study.BEST) < 20
        assert measured(row, method).mean(study.LIKENESS) < chance


def test_more_images_than_units_are_left_as_blends(rows: dict[tuple[object, object], Row]) -> None:
    few, many = rows["images a unit", "0.75"], rows["images a unit", "2"]
    assert measured(few, cpa.OURS).mean(study.ANSWERED) == 1
    assert measured(many, cpa.OURS).mean(study.ANSWERED) == measured(many, study.STRANGERS).mean(study.ANSWERED) == 0.5
    assert measured(many, cpa.OURS).mean(study.GOOD) < 0.1 < measured(few, cpa.OURS).mean(study.GOOD)


def test_only_the_number_of_images_counts_not_how_many_clients_hold_them(
    rows: dict[tuple[object, object], Row],
) -> None:
    alone, summed = rows["nothing", "plain gradient"], rows["sum over clients", "4 clients, 0.5 images a unit"]
    assert alone.cell["n"] == summed.cell["n"]
    assert measured(summed, cpa.ICA).mean(PSNR) == pytest.approx(measured(alone, cpa.ICA).mean(PSNR), abs=2)


def test_likeness_ignores_brightness_contrast_and_sign(rng: torch.Generator) -> None:
    images = torch.rand(3, 3, 8, 8, generator=rng)
    truth = fp.Truth(inputs=images, labels=torch.arange(3), owners=("client",) * 3)
    changed = fp.Reconstruction(inputs=torch.stack([1 - 2 * images[2], images[0].flip(2), 0.1 * images[1] + 5]))
    alike = study.correlations(changed, truth, (1, 2, 0))
    assert alike[1:].tolist() == pytest.approx([1, 1], abs=1e-5)
    assert float(alike[0]) < 0.5


def test_every_case_is_named_once_and_has_whole_parts() -> None:
    names = [(case.axis, case.strength) for case in study.CASES]
    assert len(set(names)) == len(names)
    for quick in (False, True):
        settings = Settings(quick=quick)
        for case in study.CASES:
            assert all(size % case.clients == 0 for size in case.batch_sizes(settings) if case.quick or not quick)
            assert math.prod(case.batch_sizes(settings)) > 0
