"""The residual of answers to several updates: read off the reconstruction, without a second reduction."""

from __future__ import annotations

import dataclasses

import pytest

import fedprism as fp
from fedprism.attacks import Disaggregation, Reduction, dense_inversion, then
from fedprism.evaluation.residuals import EXPLAINED_RESIDUAL, residuals
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
    values = [each.residual for each in residuals(observation, reconstruction)]
    assert values == [fp.residual(part, answer) for part, answer in reconstruction.per_update]
    assert fp.residual(observation, reconstruction) == min(value for value in values if value is not None)


def recorded(*defenses: fp.defenses.Defense) -> tuple[fp.Observation, fp.Truth]:
    """One image per client, each client with a defense of its own."""
    digits, model = fp.data.load("digits"), fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=0)
    seen, truths = [], []
    for number, defense in enumerate(defenses):
        scenario = fp.Scenario(model=model, clients=[digits.batch([number])], defense=defense)
        observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
        seen.append(dataclasses.replace(observation.round, participants=(f"hospital-{number}",)))
        truths.append(truth)
    return dataclasses.replace(observation, rounds=tuple(seen), subject=None), truths[-1]


def test_the_clients_that_were_recovered_are_named_however_many_were_not() -> None:
    """Noise that hides one client must not hide the other two in a mean."""
    noises = [fp.defenses.GaussianNoise(std) for std in (0.05, 1e-5, 1e-5)]
    observation, _ = recorded(*noises)
    found = residuals(observation, fp.run(dense_inversion(), observation))
    assert [(each.client, each.recovered) for each in found] == [
        ("hospital-0", False),
        ("hospital-1", True),
        ("hospital-2", True),
    ]
    values = [each.residual for each in found if each.residual is not None]
    assert sum(values) / 3 > EXPLAINED_RESIDUAL > max(values[1:])


def test_noise_in_place_of_an_update_recovers_nobody() -> None:
    observation, _ = recorded(*[fp.defenses.GaussianNoise(100.0)] * 3)
    found = residuals(observation, fp.run(dense_inversion(), observation))
    assert not any(each.recovered for each in found)
    assert all(each.residual is not None and each.residual > 0.9 for each in found)
