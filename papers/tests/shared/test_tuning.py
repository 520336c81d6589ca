"""The search for an attack's weights: planted optima, its rehearsal, and what it refuses."""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.errors import BadInput
from fedprism.types import Observation, Reconstruction
from fedprism_papers.shared.tuning import Range, search, tune


@dataclass(frozen=True, kw_only=True, repr=False)
class Grey(Attack):
    """Answers with one grey level, whatever was sent."""

    level: float

    citation: ClassVar[str] = "none 2026"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"input_shape", "batch_size"})

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        knowledge = observation.knowledge
        assert isinstance(knowledge.batch_size, int)
        assert knowledge.input_shape is not None
        shape = (knowledge.batch_size, *knowledge.input_shape)
        return Reconstruction(inputs=torch.full(shape, self.level), status="grey")


def hill(values: Mapping[str, float]) -> float:
    return -(math.log10(values["a"] / 0.02) ** 2) - math.log10(values["b"] / 3) ** 2


SPACE = {"a": Range(1e-4, 1.0), "b": Range(0.1, 100.0)}


def test_a_planted_optimum_is_approached_and_the_seed_decides() -> None:
    found = search(hill, SPACE, trials=40, seed=0)
    assert found.score > -0.3
    assert found.score == max(trial.score for trial in found.trials)
    assert found == search(hill, SPACE, trials=40, seed=0)
    assert found.values != search(hill, SPACE, trials=40, seed=1).values


def test_the_first_values_are_tried_first_and_kept_where_nothing_is_better() -> None:
    found = search(hill, SPACE, first={"a": 0.02, "b": 3.0}, trials=5, seed=0)
    assert found.trials[0].values == {"a": 0.02, "b": 3.0}
    assert found.values == {"a": 0.02, "b": 3.0}
    assert len(found.trials) == 5


def test_trials_that_come_to_nothing_are_passed_over() -> None:
    found = search(lambda v: math.nan if v["a"] > 0.01 else -v["a"], {"a": Range(1e-3, 1.0)}, trials=15, seed=0)
    assert found.values["a"] <= 0.01
    assert any(math.isnan(trial.score) for trial in found.trials)
    with pytest.raises(BadInput, match="none of 2 trials has a finite judgement"):
        search(lambda v: math.nan, {"a": Range(1e-3, 1.0)}, trials=2)


def test_a_rehearsal_finds_what_recovers_the_attackers_own_images() -> None:
    """The best grey level for images of one grey level is that level."""
    own = fp.Batch(torch.full((2, 1, 8, 8), 0.3), torch.tensor([0, 1]))
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=4, classes=2, seed=0)
    rehearsal = fp.Scenario(model=model, clients=[own])
    found = tune(
        lambda values: Grey(level=values["level"]),
        {"level": Range(0.01, 1.0)},
        rehearsal,
        fp.threats.honest_but_curious,
        trials=25,
        device="cpu",
    )
    assert found.values["level"] == pytest.approx(0.3, abs=0.06)


def test_a_rehearsal_that_an_attack_refuses_says_why() -> None:
    """Every rehearsal is a trial of `experiments`; one without a result ends the search with its reason."""
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=4, classes=2, seed=0)
    rehearsal = fp.Scenario(model=model, clients=[fp.Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))])
    threat = fp.threats.honest_but_curious.withholding("batch_size")
    with pytest.raises(BadInput, match="needs to know 'batch_size'"):
        tune(lambda values: Grey(level=values["a"]), {"a": Range(0.1, 1.0)}, rehearsal, threat, trials=1, device="cpu")


@pytest.mark.parametrize(
    ("space", "first", "trials", "message"),
    [
        ({}, None, 3, "at least one range"),
        ({"a": Range(0.0, 1.0)}, None, 3, "0 < low < high, not 0 to 1"),
        ({"a": Range(1.0, 0.1)}, None, 3, "0 < low < high, not 1 to 0.1"),
        ({"a": Range(0.1, 1.0)}, {"a": 2.0}, 3, "first value of a must be from 0.1 to 1, not 2.0"),
        ({"a": Range(0.1, 1.0)}, {"b": 0.5}, 3, "first value of a must be from 0.1 to 1, not None"),
        ({"a": Range(0.1, 1.0)}, None, 0, "trials"),
    ],
)
def test_bad_input_is_one_sentence(
    space: dict[str, Range], first: dict[str, float] | None, trials: int, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        search(hill, space, first=first, trials=trials)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BadInput, match=r"fedprism-papers\[tuning\]"):
        search(hill, SPACE, trials=1)


def test_optuna_says_what_it_was_told_to_say_before_and_after() -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    search(hill, SPACE, trials=2)
    assert optuna.logging.get_verbosity() == before
