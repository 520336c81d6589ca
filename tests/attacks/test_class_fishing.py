"""Class fishing: one class of a large batch answers alone, and its sample is recovered."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.class_fishing import FishingStatus

KNOWN = fp.attacks.Labels.KNOWN


def drawn(data: fp.data.ImageSet, target: int, others: int, times: int = 1) -> fp.Batch:
    """A batch with the target class `times` times, first, and other classes after it."""
    numbers = torch.arange(len(data))
    own, rest = numbers[data.labels == target], numbers[data.labels != target]
    chosen = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))[:others]]
    return data.batch(torch.cat([own[:times], chosen]).tolist())


def fished(
    attack: fp.attacks.ClassFishing, model: nn.Module, batch: fp.Batch, **scenario: object
) -> tuple[fp.Observation, fp.Reconstruction, fp.Truth]:
    described = fp.Scenario(model=model, clients=[batch], **scenario)  # type: ignore[arg-type]
    observation, truth = fp.simulate(described, fp.threats.malicious_server, seed=0, server=attack)
    return observation, fp.run(attack, observation, seed=0), truth


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=10, seed=0)


def test_the_gradient_is_that_of_the_fished_sample_alone(model: nn.Module, digits: fp.data.ImageSet) -> None:
    batch = drawn(digits, 3, 63)
    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    observation, _, _ = fished(attack, model, batch)
    seen = observation.rounds[0]
    alone = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    alone.load_state_dict(dict(seen.params))
    nn.functional.cross_entropy(alone(batch.inputs[:1]), batch.labels[:1]).backward()
    gradient = alone[1].weight.grad
    assert isinstance(gradient, Tensor)
    torch.testing.assert_close(64 * seen.update["1.weight"], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.quality
def test_one_sample_of_64_is_recovered_exactly_through_a_dense_layer(
    model: nn.Module, digits: fp.data.ImageSet
) -> None:
    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    _, found, truth = fished(attack, model, drawn(digits, 3, 63))
    assert found.status.startswith(FishingStatus.ONE)
    assert found.labels is not None
    assert found.labels.tolist() == [3]
    assert found.diagnostics["counted"] == pytest.approx(1, abs=1e-3)
    psnr = fp.score(found, truth, metrics=("psnr",)).values["psnr"]
    assert psnr[0] is not None
    assert psnr[0] > 80
    assert set(psnr[1:]) == {None}


@pytest.mark.quality
def test_one_sample_of_16_is_recovered_through_convolutions(digits: fp.data.ImageSet) -> None:
    lenet = fp.models.uniform_(fp.models.build("lenet", input_shape=(1, 16, 16), width=6, seed=0), seed=1)
    matching = dataclasses.replace(fp.attacks.idlg(), labels=KNOWN, iterations=60)
    attack = fp.attacks.ClassFishing(target=5, matching=matching)
    _, found, truth = fished(attack, lenet, drawn(digits, 5, 15))
    psnr = fp.score(found, truth, metrics=("psnr",)).values["psnr"]
    assert psnr[0] is not None
    assert psnr[0] > 35


def test_several_samples_of_the_class_are_counted(model: nn.Module, digits: fp.data.ImageSet) -> None:
    matching = dataclasses.replace(fp.attacks.idlg(), labels=KNOWN, iterations=2)
    attack = fp.attacks.ClassFishing(target=3, matching=matching)
    _, found, _ = fished(attack, model, drawn(digits, 3, 20, times=4))
    assert found.status.startswith(FishingStatus.SEVERAL)
    assert found.inputs is not None
    assert len(found.inputs) == 4


@pytest.mark.quality
def test_one_local_step_is_as_good_as_a_gradient(model: nn.Module, digits: fp.data.ImageSet) -> None:
    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    _, found, truth = fished(attack, model, drawn(digits, 3, 15), protocol=fp.FedAvg(lr=0.01))
    assert fp.score(found, truth, metrics=("psnr",)).mean("psnr") > 50


@pytest.mark.parametrize("factor", [1e-6, 1e6, -1.0])
@pytest.mark.parametrize("times", [0, 1, 4])
@pytest.mark.parametrize("others", [0, 20, 63])
def test_samples_are_counted_whatever_the_scale(
    others: int, times: int, factor: float, model: nn.Module, digits: fp.data.ImageSet
) -> None:
    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    batch = drawn(digits, 3, others + 1, times=times)
    protocol = fp.FedAvg(lr=0.01) if factor < 0 else fp.FedSGD()
    observation, plain, _ = fished(attack, model, batch, protocol=protocol, defense=fp.defenses.Clip(0.01))
    update = {name: factor * tensor for name, tensor in observation.round.update.items()}
    scaled = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))
    answer = fp.run(attack, scaled)
    assert plain.diagnostics["fished"] == answer.diagnostics["fished"] == times
    assert answer.status == plain.status
    torch.testing.assert_close(answer.inputs, plain.inputs, atol=1e-4, rtol=1e-3)


def test_of_two_classes_the_count_is_not_known(digits: fp.data.ImageSet) -> None:
    pair = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=2, seed=0)
    two = digits.batch([int((digits.labels == label).nonzero()[0]) for label in (0, 1, 1, 1)])
    attack = fp.attacks.ClassFishing(target=0, matching=fp.attacks.dense_inversion())
    _, found, _ = fished(attack, pair, two)
    assert found.status.startswith(FishingStatus.UNSURE)


@pytest.mark.parametrize("seed", range(5))
def test_noise_in_place_of_an_update_is_no_closed_trap(seed: int, model: nn.Module, digits: fp.data.ImageSet) -> None:
    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    observation, _, _ = fished(attack, model, drawn(digits, 3, 63))
    rng = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in observation.round.update.items()}
    planted = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=noise),))
    assert fp.run(attack, planted).status.startswith(FishingStatus.OPEN)


def test_an_absent_class_is_said_to_be_absent(model: nn.Module, digits: fp.data.ImageSet) -> None:
    _, found, _ = fished(fp.attacks.ClassFishing(target=3), model, drawn(digits, 3, 15, times=0))
    assert found.status == FishingStatus.ABSENT
    assert found.inputs is not None
    assert len(found.inputs) == 0


def test_a_trap_that_does_not_close_is_said_to_be_open(model: nn.Module, digits: fp.data.ImageSet) -> None:
    matching = dataclasses.replace(fp.attacks.idlg(), labels=KNOWN, iterations=2)
    _, found, _ = fished(fp.attacks.ClassFishing(target=3, bias=0.1, matching=matching), model, drawn(digits, 3, 31))
    assert found.status.startswith(FishingStatus.OPEN)


def test_refuses_a_head_without_bias_and_a_class_that_is_not_there(digits: fp.data.ImageSet) -> None:
    batch = drawn(digits, 3, 3)
    headless = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 10, bias=False))
    with pytest.raises(fp.NotApplicable, match="output layer with a bias"):
        fished(fp.attacks.class_fishing(), headless, batch)
    small = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    with pytest.raises(fp.NotApplicable, match="class 12, but this model has one of 10"):
        fished(fp.attacks.ClassFishing(target=12), small, batch)
    with pytest.raises(fp.NotApplicable, match="layers below the last"):
        fished(fp.attacks.ClassFishing(target=3), small, batch)


def test_refuses_several_local_steps_and_other_losses(model: nn.Module, digits: fp.data.ImageSet) -> None:
    batch = drawn(digits, 3, 7)
    with pytest.raises(fp.NotApplicable, match="several steps"):
        fished(fp.attacks.ClassFishing(target=3), model, batch, protocol=fp.FedAvg(epochs=2))
    with pytest.raises(fp.NotApplicable, match="cross-entropy"):
        fished(fp.attacks.ClassFishing(target=3), model, batch, loss="mse")
    with pytest.raises(fp.errors.BadInput, match="above 0"):
        fp.attacks.ClassFishing(bias=0.0)


def test_the_output_layer_is_the_one_that_runs_last(digits: fp.data.ImageSet) -> None:
    """A model that defines its output layer first, and works with a parameter of its own after it."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(64, 10), nn.Linear(256, 64)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(images.flatten(1))))

    attack = fp.attacks.ClassFishing(target=3, matching=fp.attacks.dense_inversion())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        observation, found, _ = fished(attack, Reversed(), drawn(digits, 3, 15))
    assert float(observation.round.params["head.weight"][0].norm()) == 0
    assert found.status.startswith(FishingStatus.ONE)
