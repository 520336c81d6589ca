"""The certificate: what samples leave unexplained of an update, whatever the update was multiplied by."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.attacks.certificate import certified, rounding_error, sine, unexplained


def observed(protocol: fp.FedSGD | fp.FedAvg | None = None, **scenario: object) -> tuple[fp.Observation, fp.Truth]:
    model = fp.models.build("lenet", input_shape=(1, 16, 16), classes=10, seed=0)
    batch = fp.data.load("digits", size=16).batch([0, 1])
    made = fp.Scenario(model=model, clients=[batch], protocol=protocol or fp.FedSGD(), **scenario)
    return fp.simulate(made, fp.threats.honest_but_curious, seed=0, device="cpu")


def multiplied(observation: fp.Observation, factor: float) -> fp.Observation:
    round = observation.round
    update = {name: factor * tensor for name, tensor in round.update.items()}
    return dataclasses.replace(observation, rounds=(dataclasses.replace(round, update=update),))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6, -1.0])
def test_the_truth_explains_its_update_at_every_scale(factor: float) -> None:
    observation, truth = observed()
    assert unexplained(multiplied(observation, factor), truth.inputs, truth.labels) < 1e-5
    assert certified(multiplied(observation, factor), truth.inputs, truth.labels)


def test_other_samples_and_noise_are_not_certified() -> None:
    observation, truth = observed()
    assert not certified(observation, truth.inputs.flip(3), truth.labels)
    rng = torch.Generator().manual_seed(0)
    update = {name: torch.randn(t.shape, generator=rng) for name, t in observation.round.update.items()}
    noise = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))
    assert unexplained(noise, truth.inputs, truth.labels) > 0.9


def test_a_step_of_unknown_training_is_read_as_one_gradient() -> None:
    one_step = fp.FedAvg(lr=0.01, batch_size=2)
    observation, truth = observed(one_step)
    stranger = dataclasses.replace(observation, knowledge=fp.Knowledge(loss="cross_entropy"))
    assert certified(stranger, truth.inputs, truth.labels)
    observation, truth = observed(fp.FedAvg(lr=0.1, epochs=20, batch_size=1))
    stranger = dataclasses.replace(observation, knowledge=fp.Knowledge(loss="cross_entropy"))
    assert certified(stranger, truth.inputs, truth.labels) is False


def test_nobody_can_tell_without_the_loss() -> None:
    observation, truth = observed()
    assert certified(dataclasses.replace(observation, knowledge=fp.Knowledge()), truth.inputs, truth.labels) is None
    assert certified(observation, truth.inputs, None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_off_the_numbers(dtype: torch.dtype) -> None:
    observation, truth = observed()
    update = {name: tensor.to(dtype).float() for name, tensor in observation.round.update.items()}
    rounded = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))
    assert rounding_error(update) == torch.finfo(dtype).eps
    assert certified(rounded, truth.inputs, truth.labels)


def test_sine_of_known_angles() -> None:
    def vector(x: float, y: float) -> list[Tensor]:
        return [torch.tensor([x]), torch.tensor([y])]

    assert sine(vector(1, 0), tuple(vector(3, 4))) == pytest.approx(0.8)
    assert sine(vector(0, 0), tuple(vector(3, 4))) == 1
    assert sine(vector(1e-9, 0), tuple(vector(2, 2e-6))) == pytest.approx(1e-6)


def test_an_update_that_every_input_explains_certifies_none() -> None:
    """Logistic regression: 257 numbers, of which the scale says nothing, for an input of 256."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 1))
    batch = fp.Batch(fp.data.load("digits", size=16).batch([0]).inputs, torch.ones(1))
    scenario = fp.Scenario(model=model, clients=[batch], loss="binary_cross_entropy")
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    assert unexplained(observation, truth.inputs, truth.labels) < 1e-5
    assert certified(observation, truth.inputs, truth.labels) is None
    assert certified(observation, truth.inputs.flip(3), truth.labels) is False
