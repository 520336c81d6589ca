"""Attacks on one tensor of floating-point numbers refuse other models in one sentence."""

from __future__ import annotations

import pytest

import fedprism as fp
from planted_inputs import KINDS, Kind, scenario

OTHERS = [kind for kind in KINDS if kind.name in ("text", "dict in, dict out", "tuple in, own loss")]


@pytest.mark.parametrize("kind", OTHERS, ids=[kind.name for kind in OTHERS])
@pytest.mark.parametrize("name", ["inverting-gradients", "cocktail-party", "dense-inversion"])
def test_other_inputs_are_refused_in_one_sentence(kind: Kind, name: str) -> None:
    observation, _ = fp.simulate(scenario(kind), fp.threats.honest_but_curious, seed=0)
    with pytest.raises(fp.errors.NotApplicable, match="one input tensor of floating-point numbers, not inputs") as told:
        fp.run(fp.attacks.ATTACKS[name](), observation)
    assert "; " in str(told.value)
    assert str(told.value).endswith(".")


def test_sums_are_taken_apart_whatever_models_are_fed() -> None:
    kind = KINDS[0]
    clients = [fp.Batch(kind.inputs(2), kind.labels(2)), fp.Batch(kind.inputs(3)[1:], kind.labels(3)[1:])]
    federation = fp.Scenario(
        model=scenario(kind).model, clients=clients, rounds=8, frozen=True, participation=0.5, aggregation="sum"
    )
    threat = fp.threats.secure_aggregation.granting("participation")
    observation, truth = fp.simulate(federation, threat, seed=0)
    answer = fp.run(fp.attacks.disaggregation(), observation, seed=0)
    errors = fp.score_updates(answer, truth)
    assert len(errors) == 2
    assert all(error is not None and error < 1e-4 for error in errors.values())
