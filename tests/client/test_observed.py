"""Sign and kind of an observed update: which way the gradient points that the client computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedprism as fp
from fedprism.client.observed import (
    as_delta,
    as_gradient,
    direction,
    is_batch_gradient,
    local_steps,
    mean_update,
)

ONE_STEP = fp.FedAvg(lr=0.05)
TWO_STEPS = fp.FedAvg(lr=0.05, batch_size=2, shuffle=False)


def observe(protocol: fp.FedSGD | fp.FedAvg, clients: int = 1, aggregation: str = "sum") -> fp.Observation:
    digits = fp.data.load("digits")
    batches = [digits.batch([4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3]) for k in range(clients)]
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=batches, protocol=protocol, aggregation=aggregation)  # type: ignore[arg-type]
    return fp.simulate(scenario, fp.threats.secure_aggregation, device="cpu")[0]


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("protocol", [fp.FedSGD(), ONE_STEP])
def test_a_direction_points_along_the_gradient(protocol: fp.FedSGD | fp.FedAvg, aggregation: str) -> None:
    (gradient,) = observe(fp.FedSGD(), clients=3, aggregation="mean").rounds
    (round,) = observe(protocol, clients=3, aggregation=aggregation).rounds
    for name, tensor in direction(round).items():
        cosine = torch.nn.functional.cosine_similarity(tensor.flatten(), gradient.update[name].flatten(), dim=0)
        assert cosine > 0.9999


def test_several_steps_are_no_batch_gradient() -> None:
    observation = observe(TWO_STEPS)
    (round,), knowledge = observation.rounds, observation.knowledge
    assert local_steps(round, knowledge) == 2
    assert not is_batch_gradient(round, knowledge)


@pytest.mark.parametrize("field", ["local_epochs", "local_batch_size", "batch_size"])
def test_what_is_unknown_leaves_it_unknown_whether_it_was_one_step(field: str) -> None:
    observation = observe(ONE_STEP)
    assert is_batch_gradient(observation.rounds[0], observation.knowledge)
    known = dataclasses.replace(observation.knowledge, **{field: None})
    assert not is_batch_gradient(observation.rounds[0], known)


def test_a_sum_has_a_mean_and_a_step_has_a_gradient() -> None:
    (sums,), (means,) = (
        observe(fp.FedSGD(), clients=2).rounds,
        observe(fp.FedSGD(), clients=2, aggregation="mean").rounds,
    )
    for name, tensor in mean_update(sums).items():
        torch.testing.assert_close(tensor, means.update[name])
        torch.testing.assert_close(as_gradient(as_delta(sums.update, 0.1), 0.1)[name], sums.update[name])
