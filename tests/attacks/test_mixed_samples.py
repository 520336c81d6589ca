"""Samples of a client that mixes, out of all its updates at once: better than by decoding, and not behind signs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import Adam, Encodings, Labels, MixedSamples, Starts, TotalVariation, bn_exact
from fedprism.attacks.mixed_samples import _mixtures, _Together
from fedprism.defenses import InstaHide, MixUp, Prune
from fedprism.types import Knowledge

CENTRED = ((0.5,) * 3, (0.25,) * 3)
SERVER = fp.threats.honest_but_curious.granting("labels", "mixing")
MATCHING = replace(
    bn_exact(),
    labels=Labels.KNOWN,
    priors=(TotalVariation(0.01),),
    batchnorm=replace(bn_exact().batchnorm, pull_weight=0.01),
    optimizer=Adam(stepwise=True),
    lr=0.2,
    iterations=120,
    starts=Starts(),
)


@pytest.fixture(scope="module")
def images() -> fp.Batch:
    drawn = fp.data.load("photos", size=8).draw(6, torch.Generator().manual_seed(0))
    return fp.Batch((drawn.inputs - 0.5) / 0.25, drawn.labels)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * 16, 10)),
        )


def mixed(
    network: nn.Module, images: fp.Batch, defense: fp.defenses.Defense, threat: fp.ThreatModel, rounds: int = 3
) -> tuple[fp.Observation, fp.Truth]:
    scenario = fp.Scenario(
        model=network, clients=[images], rounds=rounds, frozen=True, defense=defense, normalization=CENTRED
    )
    return fp.simulate(scenario, threat, seed=1, device="cpu")


def decibels(found: fp.Reconstruction, truth: fp.Truth) -> float:
    values = [value or 0.0 for value in fp.score(found, truth, metrics=("psnr",)).values["psnr"]]
    return sum(values) / len(values)


@pytest.mark.quality
def test_images_are_found_in_all_updates_at_once_and_better_than_by_decoding(
    network: nn.Module, images: fp.Batch
) -> None:
    observation, truth = mixed(network, images, MixUp(3), SERVER.granting("batchnorm_exact"))
    matching = replace(MATCHING, iterations=240)
    found = fp.run(MixedSamples(matching=matching), observation)
    assert "18 mixtures of 6 samples at once" in found.status
    assert found.ambiguity == frozenset(), "which image is which is told"
    # 24 to 34 dB over twelve draws, and 4 to 13 dB more than by decoding.
    assert decibels(found, truth) > 18
    assert decibels(found, truth) > decibels(fp.run(Encodings(inner=matching), observation), truth) + 1.5


def test_several_starts_race(network: nn.Module, images: fp.Batch) -> None:
    observation, _ = mixed(network, images, MixUp(3), SERVER.granting("batchnorm_exact"), rounds=2)
    race = replace(MATCHING, iterations=10, starts=Starts(restarts=3, race=0.2))
    assert fp.run(MixedSamples(matching=race), observation).diagnostics["iterations_run"] == 4
    whole = replace(race, starts=Starts(restarts=3))
    found = fp.run(MixedSamples(matching=whole), observation)
    assert found.diagnostics["iterations_run"] == 10
    assert "too few mixtures" not in found.status


def test_too_few_mixtures_are_said_to_be_too_few(network: nn.Module, images: fp.Batch) -> None:
    scenario = fp.Scenario(model=network, clients=[images], rounds=1, fraction=0.5, defense=MixUp(3))
    observation, _ = fp.simulate(scenario, SERVER.granting("batchnorm_exact"), seed=1, device="cpu")
    found = fp.run(MixedSamples(matching=replace(MATCHING, iterations=1)), observation)
    assert "3 mixtures of" in found.status
    assert "too few mixtures to tell the samples apart" in found.status


def test_pruning_that_is_known_is_followed(network: nn.Module, images: fp.Batch) -> None:
    threat = SERVER.granting("batchnorm_exact", "defense")
    observation, _ = mixed(network, images, fp.chain(MixUp(3), Prune(0.9)), threat, rounds=2)
    found = fp.run(MixedSamples(matching=replace(MATCHING, iterations=20)), observation)
    assert found.diagnostics["following_pruning"] < found.diagnostics["ignoring_pruning"]
    assert found.status.endswith("following the pruning explains more")
    assert {"mixing", "labels", "batchnorm_exact", "defense"} <= found.knowledge_used


def test_the_true_images_explain_everything(network: nn.Module, images: fp.Batch) -> None:
    observation, truth = mixed(network, images, MixUp(3), SERVER.granting("batchnorm_exact"))
    attack = MixedSamples(matching=MATCHING)
    singles, weights = _mixtures(attack.name, observation)
    together = _Together([attack._update(*pair) for pair in zip(singles, weights, strict=True)], MATCHING)
    found = together.gradients_of(truth.inputs, None)
    assert all(torch.allclose(ours, sent, atol=1e-5) for ours, sent in zip(found, together.target, strict=True))
    assert sum(float(tensor.square().sum()) for tensor in together.target) == pytest.approx(3), "each update counts one"
    assert float(together.pull(truth.inputs).detach()) < 1e-5
    together.gradients_of(truth.inputs.flip(0), None)
    assert float(together.pull(truth.inputs.flip(0)).detach()) > 1e-4


def test_what_it_is_not_told_it_refuses(network: nn.Module, images: fp.Batch) -> None:
    attack = MixedSamples(matching=replace(MATCHING, iterations=1))
    statistics = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
    for threat, field in ((statistics, "mixing"), (statistics.granting("mapping"), "mixing")):
        with pytest.raises(fp.MissingKnowledge, match="'mixing'") as caught:
            fp.run(attack, mixed(network, images, MixUp(3), threat)[0])
        assert caught.value.field == field
    signs, _ = mixed(network, images, InstaHide(3), SERVER.granting("batchnorm_exact", "defense"))
    with pytest.raises(fp.NotApplicable, match="without random signs, not InstaHide"):
        fp.run(attack, signs)
    known: Knowledge = replace(signs.knowledge, batch_size=5, defense=None)
    with pytest.raises(fp.NotApplicable, match="as many mixtures behind an update"):
        fp.run(attack, replace(signs, knowledge=known))
