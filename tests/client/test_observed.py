"""Sign and scale of an observed update: it times its factor is the gradient that the client computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedprism as fp
from fedprism.client.observed import (
    as_delta,
    as_gradient,
    batch_gradient_factor,
    direction,
    gradient_factor,
    local_steps,
    mean_update,
)
from fedprism.types import Round, Update

ONE_STEP = fp.FedAvg(lr=0.05)
TWO_STEPS = fp.FedAvg(lr=0.05, batch_size=2, shuffle=False)


def observe(protocol: fp.FedSGD | fp.FedAvg, clients: int = 1, aggregation: str = "sum") -> fp.Observation:
    digits = fp.data.load("digits")
    batches = [digits.batch([4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3]) for k in range(clients)]
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=batches, protocol=protocol, aggregation=aggregation)  # type: ignore[arg-type]
    return fp.simulate(scenario, fp.threats.secure_aggregation, device="cpu")[0]


def scaled(round: Round, factor: float | None) -> Update:
    assert factor is not None
    return {name: factor * tensor for name, tensor in direction(round).items()}


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("protocol", [fp.FedSGD(), ONE_STEP])
def test_direction_times_factor_is_the_gradient(protocol: fp.FedSGD | fp.FedAvg, aggregation: str) -> None:
    (gradient,) = observe(fp.FedSGD(), clients=3, aggregation="mean").rounds
    observation = observe(protocol, clients=3, aggregation=aggregation)
    (round,) = observation.rounds
    answer = scaled(round, batch_gradient_factor(round, observation.knowledge))
    for name, tensor in gradient.update.items():
        torch.testing.assert_close(answer[name], tensor, rtol=1e-3, atol=1e-6)


def test_several_steps_are_no_batch_gradient_but_have_a_mean_one() -> None:
    observation = observe(TWO_STEPS)
    (round,), knowledge = observation.rounds, observation.knowledge
    assert local_steps(round, knowledge) == 2
    assert batch_gradient_factor(round, knowledge) is None
    assert gradient_factor(round, knowledge, steps=2) == pytest.approx(1 / (2 * 0.05))
    assert gradient_factor(round, knowledge, steps=None) is None


@pytest.mark.parametrize("field", ["local_lr", "local_epochs", "local_batch_size", "batch_size"])
def test_what_is_unknown_leaves_the_factor_unknown(field: str) -> None:
    observation = observe(ONE_STEP)
    known = dataclasses.replace(observation.knowledge, **{field: None})
    assert batch_gradient_factor(observation.rounds[0], known) is None


def test_a_sum_has_a_mean_and_a_step_has_a_gradient() -> None:
    (sums,), (means,) = (
        observe(fp.FedSGD(), clients=2).rounds,
        observe(fp.FedSGD(), clients=2, aggregation="mean").rounds,
    )
    for name, tensor in mean_update(sums).items():
        torch.testing.assert_close(tensor, means.update[name])
        torch.testing.assert_close(as_gradient(as_delta(sums.update, 0.1), 0.1)[name], sums.update[name])
