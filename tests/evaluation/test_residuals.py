"""The residual of answers to several updates: read off the reconstruction, without a second reduction."""

from __future__ import annotations

import dataclasses

import pytest

import fedprism as fp
from fedprism.attacks import Disaggregation, Reduction, dense_inversion, then
from fedprism.experiments.trial import Scoring, Setting, Trial


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Counted(Reduction):
    """Disaggregation that counts how often it is asked."""

    calls: list[int]

    @property
    def uses(self) -> frozenset[str]:
        return Disaggregation().uses

    def reduce(self, observation: fp.Observation) -> tuple[fp.Observation, ...]:
        self.calls.append(len(observation.rounds))
        return Disaggregation().reduce(observation)


def federation() -> fp.Observation:
    digits = fp.data.load("digits")
    scenario = fp.Scenario(
        model=fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=0),
        clients=[digits.batch([k]) for k in range(3)],
        rounds=6,
        frozen=True,
        window=2,
        participation=0.6,
        aggregation="sum",
    )
    return fp.simulate(scenario, fp.threats.secure_aggregation.granting("participation", "examples"), device="cpu")[0]


def test_a_trial_reduces_once() -> None:
    calls: list[int] = []
    observation, attack = federation(), then(Counted(calls=calls), dense_inversion())
    trial = Trial(
        key="key",
        setting=lambda device: Setting(observation=observation),
        attack=attack,
        seed=0,
        scoring=lambda: Scoring(metrics=()),
    )
    record = trial.run("cpu").record
    assert calls == [6]
    assert record is not None
    assert record.residual == pytest.approx(0, abs=1e-3)


def test_every_update_comes_with_its_own_answer() -> None:
    observation = federation()
    reconstruction = fp.run(then(Disaggregation(), dense_inversion()), observation, device="cpu")
    assert reconstruction.per_update is not None
    assert [part.subject for part, _ in reconstruction.per_update] == list(reconstruction.owners or ())
    values = [fp.residual(part, answer) for part, answer in reconstruction.per_update]
    assert fp.residual(observation, reconstruction) == pytest.approx(sum(value or 0.0 for value in values) / 3)
