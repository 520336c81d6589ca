"""A trial's outcome: the same residual whether a federation was simulated or captured, and one reduction per trial."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedprism as fp
from fedprism.evaluation.residuals import residuals
from fedprism.experiments import Scoring, Setting, Trial, run_trial
from fedprism.types import Observation

SCORING = Scoring(metrics=("psnr",))


@pytest.fixture(scope="module")
def three_clients() -> tuple[Observation, fp.Truth]:
    digits = fp.data.load("digits", size=8)
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    clients = [digits.batch([number]) for number in range(3)]
    return fp.simulate(fp.Scenario(model=model, clients=clients), fp.threats.honest_but_curious, seed=0)


def residual(observation: Observation, truth: fp.Truth | None) -> float | None:
    trial = Trial(
        key="0" * 16,
        setting=lambda device: Setting(observation=observation, truth=truth),
        attack=fp.attacks.dense_inversion(),
        seed=0,
        scoring=lambda: SCORING,
    )
    outcome = run_trial(trial, device="cpu")
    assert outcome.record is not None, outcome.reason
    return outcome.record.residual


def test_several_updates_have_one_residual_simulated_or_captured(
    three_clients: tuple[Observation, fp.Truth], tmp_path: Path
) -> None:
    observation, truth = three_clients
    simulated = residual(observation, truth)
    assert simulated is not None
    assert simulated < 1e-4, "every client's sample came back exactly"
    captured = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"), model=observation.model)
    assert residual(captured, None) == pytest.approx(simulated)


def test_an_update_without_answer_is_unexplained(three_clients: tuple[Observation, fp.Truth]) -> None:
    observation, _ = three_clients
    answer = fp.run(fp.attacks.dense_inversion(), observation, seed=0)
    assert answer.per_update is not None
    (part, _), *others = answer.per_update
    assert answer.inputs is not None
    silent = fp.Reconstruction(inputs=answer.inputs[:0])
    changed = fp.Reconstruction(inputs=answer.inputs, per_update=((part, silent), *others))
    (unexplained, *explained) = [each.residual for each in residuals(observation, changed)]
    assert unexplained == 1
    assert max(explained) < 1e-4
    assert fp.residual(observation, changed) == min(explained)
