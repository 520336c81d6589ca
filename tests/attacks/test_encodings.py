"""Samples out of the updates of clients that mix: exact where the mixtures are, refused where they cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, Encodings, dense_inversion
from fedprism.defenses import InstaHide, MixUp

SERVER = fp.threats.honest_but_curious
EXACT = Encodings(inner=dense_inversion(), ridge=0.0)


@pytest.fixture(scope="module")
def small() -> fp.data.ImageSet:
    return fp.data.load("photos", size=8)


def encoded(
    images: fp.data.ImageSet,
    threat: fp.ThreatModel,
    defense: MixUp,
    *,
    rounds: int,
    size: int = 1,
    unique_labels: bool = False,
    **changes: Any,
) -> tuple[fp.Observation, fp.Truth]:
    """A client that holds eight images, of either sign as inputs, and trains on `size` of them in a round."""
    drawn = images.draw(8, torch.Generator().manual_seed(0), unique_labels=unique_labels)
    data = fp.Batch((drawn.inputs.double() - 0.5) / 0.25, drawn.labels)
    model = fp.models.build("fc2", input_shape=(3, 8, 8), hidden=24, classes=images.classes, seed=0).double()
    settings = {"frozen": True, "normalization": ((0.5,) * 3, (0.25,) * 3), **changes}
    scenario = fp.Scenario(model=model, clients=[data], rounds=rounds, fraction=size / 8, defense=defense, **settings)
    return fp.simulate(scenario, threat, seed=1, device="cpu")


def decibels(found: fp.Reconstruction, truth: fp.Truth) -> list[float | None]:
    return list(fp.score(found, truth, metrics=("psnr",)).values["psnr"])


@pytest.mark.quality
@pytest.mark.parametrize("frozen", [True, False])
def test_mixup_is_decoded_exactly_where_its_mixtures_are(frozen: bool, small: fp.data.ImageSet) -> None:
    observation, truth = encoded(small, SERVER.granting("mixing"), MixUp(3), rounds=30, frozen=frozen)
    found = fp.run(EXACT, observation)
    assert len(truth.inputs) == 8
    assert all(value is not None and value > 90 for value in decibels(found, truth))
    assert found.ambiguity == frozenset(), "which image is which is known"
    assert "30 encodings of 8 samples, weights known; the inputs explain" in found.status
    assert torch.equal(found.labels, truth.labels), "the soft label of one mixture is read off its update"
    # One update alone shows a mixture of several images.
    alone = fp.run(dense_inversion(), observation)
    assert max(value or 0 for value in decibels(alone, truth)) < 60  # 21 to 31 over twenty draws


@pytest.mark.quality
def test_the_mapping_alone_is_enough_with_soft_labels(small: fp.data.ImageSet) -> None:
    for granted in (("mapping",), ("mapping", "labels")):
        observation, truth = encoded(small, SERVER.granting(*granted), MixUp(3), rounds=40)
        found = fp.run(EXACT, observation)
        assert "weights read off the soft labels" in found.status
        assert torch.equal(found.labels, truth.labels)
        assert all(value is not None and value > 60 for value in decibels(found, truth))
    blind = replace(observation, knowledge=replace(observation.knowledge, labels=None, loss=None))
    with pytest.raises(fp.MissingKnowledge, match="'labels'"):
        fp.run(EXACT, blind)


@pytest.mark.quality
def test_instahide_is_decoded_up_to_signs(small: fp.data.ImageSet) -> None:
    observation, truth = encoded(small, SERVER.granting("mixing"), InstaHide(3), rounds=40)
    found = fp.run(replace(EXACT, masked=True), observation)
    assert found.ambiguity == {"sign"}
    assert found.inputs is not None
    # Pictures as small as these leave the sign of an entry open, too: their neighbours mislead in one draw of ten.
    signs = (found.inputs * truth.inputs).sum(0).sign()
    turned = replace(found, inputs=found.inputs * signs)
    assert all(value is not None and value > 90 for value in decibels(turned, truth))
    naive = fp.run(EXACT, observation)
    assert max(value or 0 for value in decibels(naive, truth)) < 25, "signs read as if there were none"


@dataclass(frozen=True, kw_only=True, repr=False)
class Planted(Attack):
    """Stands for an attack that finds a batch of mixtures to the last digit but cannot know their order."""

    answers: Iterator[Tensor]
    by_labels: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"labels"} if self.by_labels else ())

    def run(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        return fp.Reconstruction(inputs=next(self.answers), ambiguity=frozenset({"order"}), status="planted")


@pytest.mark.parametrize("by_labels", [True, False])
def test_batches_are_told_apart_by_their_soft_labels(by_labels: bool, small: fp.data.ImageSet) -> None:
    observation, truth = encoded(
        small, SERVER.granting("mixing", "labels"), MixUp(3), rounds=8, size=4, unique_labels=True
    )
    mixing = observation.knowledge.mixing
    assert mixing is not None
    matrix = torch.zeros(32, 8, dtype=torch.float64).scatter_(1, mixing["mapping"], mixing["coefficients"])
    fed = (matrix @ truth.inputs.flatten(1)).view(8, 4, 3, 8, 8)
    attack = Encodings(inner=Planted(answers=iter(fed), by_labels=by_labels), ridge=0.0)
    if by_labels:
        assert all(value is not None and value > 90 for value in decibels(fp.run(attack, observation), truth))
    else:
        with pytest.raises(fp.NotApplicable, match="planted leaves the order open"):
            fp.run(attack, observation)


def test_statistics_of_each_update_reach_the_inner_attack(small: fp.data.ImageSet) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    drawn = small.draw(4, torch.Generator().manual_seed(0), unique_labels=True)  # so that soft labels differ
    scenario = fp.Scenario(model=model, clients=[drawn], rounds=2, defense=MixUp(2))
    observation, _ = fp.simulate(scenario, SERVER.granting("mixing", "labels", "batchnorm_exact"), device="cpu")
    inner = replace(fp.attacks.bn_exact(), labels="known", iterations=12)
    found = fp.run(Encodings(inner=inner), observation)
    assert found.inputs is not None
    assert len(found.inputs) == 4
    assert "pulled towards the exact statistics" in found.status
    assert "batchnorm_exact" in found.knowledge_used


def test_without_being_told_what_was_mixed_it_refuses(small: fp.data.ImageSet) -> None:
    observation, _ = encoded(small, SERVER.granting("labels"), MixUp(3), rounds=2)
    for attack in (EXACT, fp.attacks.mixup_decoding(), fp.attacks.instahide_decoding()):
        with pytest.raises(fp.MissingKnowledge, match="'mixing'") as caught:
            fp.run(attack, observation)
        assert caught.value.field == "mixing"


def test_what_cannot_be_told_apart_is_refused(small: fp.data.ImageSet) -> None:
    threat = SERVER.granting("mixing")
    pairs, _ = encoded(small, threat, MixUp(3), rounds=4, size=2)
    with pytest.raises(
        fp.NotApplicable, match=r"which encoding is which, but dense-inversion leaves the order open; grant"
    ):
        fp.run(EXACT, pairs)
    steps, _ = encoded(small, threat, MixUp(3), rounds=2, size=4, protocol=fp.FedAvg(batch_size=2, epochs=2))
    with pytest.raises(fp.NotApplicable, match="update 0 has 8 and 4; attack clients that take one local step"):
        fp.run(EXACT, steps)
    several = replace(steps, rounds=tuple(replace(seen, clients=2) for seen in steps.rounds))
    with pytest.raises(fp.NotApplicable, match="updates of single clients, not aggregates"):
        fp.run(EXACT, several)


def test_too_few_encodings_are_said_to_be_too_few(small: fp.data.ImageSet) -> None:
    observation, _ = encoded(small, SERVER.granting("mixing"), MixUp(3), rounds=4)
    assert "too few encodings" in fp.run(EXACT, observation).status


def test_images_with_random_signs_are_smooth_in_magnitude() -> None:
    inner = fp.attacks.instahide_decoding().inner
    assert isinstance(inner, fp.attacks.GradientMatching)
    assert inner.priors == (fp.attacks.TotalVariation(0.01, magnitude=True),)
    assert eval(repr(fp.attacks.instahide_decoding()), vars(fp.attacks)) == fp.attacks.instahide_decoding()


def test_settings_out_of_range_are_refused() -> None:
    for change in ({"ridge": -1.0}, {"ridge": float("nan")}):
        with pytest.raises(fp.errors.BadInput, match="ridge must be at least 0"):
            replace(EXACT, **change)  # type: ignore[arg-type]
