"""Gradients kept as factors: the same distances, slopes and answers as gradients that are written down."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import GradientMatching, Labels, TotalVariation, cosine, squared_error
from fedprism.attacks.gradient_matching.forward import PreparedForward, forward_model
from fedprism.runtime import double_backward, factors
from fedprism.runtime.factors import Factors
from fedprism.solvers.matching.distances import slope_towards

SIZE, CLASSES = 2, 5


class Tied(nn.Module):
    """One weight in two places, one of them not a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(48, 48), nn.Linear(48, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs.flatten(1)).tanh()
        return self.last(nn.functional.linear(hidden, self.inner.weight).tanh())


class Viewed(nn.Module):
    """Needs its inputs to lie in memory in their order."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(-1)[: inputs.numel()].view(len(inputs), -1)


def network() -> nn.Module:
    """Convolutions at few positions and dense layers, with a step in place, which must not change what was put down."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.Sigmoid(),
        nn.Conv2d(24, 24, 2, stride=2, bias=False),
        nn.LeakyReLU(inplace=True),
        Viewed(),
        nn.Linear(24, 32),
        Viewed(),
        nn.ELU(inplace=True),
        nn.Linear(32, CLASSES),
    )


def observed(model: nn.Module, **scenario: object) -> fp.Observation:
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng) - 0.5)
    inputs = torch.rand(SIZE, 3, 4, 4, generator=rng, dtype=torch.float64)
    batch = fp.Batch(inputs, torch.randint(CLASSES, (SIZE,), generator=rng))
    made = fp.Scenario(**{"model": model.double(), "clients": [batch], "training": False, **scenario})  # type: ignore[arg-type]
    threat = fp.threats.honest_but_curious.granting("labels", "defense")
    return fp.simulate(made, threat, device="cpu")[0]


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "MANY_WEIGHTS", 100)
    monkeypatch.setattr(double_backward, "MANY_WEIGHTS", 100)


def forwards(observation: fp.Observation) -> PreparedForward:
    return PreparedForward(forward_model(observation, observation.rounds[0]))


def guess(seed: int = 1) -> Tensor:
    return torch.rand(SIZE, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("distance", [cosine, squared_error])
def test_factors_stand_for_what_is_written_down(distance: object) -> None:
    observation = observed(network())
    prepared, labels = forwards(observation), torch.tensor([0, 3])
    inputs = guess().requires_grad_()
    sent, written = prepared.factoring(inputs.shape)(inputs, labels), prepared(inputs, labels)
    kept = [isinstance(one, Factors) for one in sent]
    assert dict(zip(prepared.forward.names, kept, strict=True)) == {
        name: name in ("3.weight", "6.weight", "9.weight") for name in prepared.forward.names
    }
    slope_of = slope_towards(distance, prepared.forward.target)  # type: ignore[arg-type]
    answers = []
    for one in (sent, written):
        slope = slope_of(one)
        moving = [(o, d) for o, d in zip(slope.outputs, slope.direction, strict=True) if o.requires_grad]
        outputs, ways = map(list, zip(*moving, strict=True))
        answers.append([slope.value, slope.scale * torch.autograd.grad(outputs, inputs, ways)[0]])
    torch.testing.assert_close(answers[0], answers[1])
    for factored, gradient in zip(sent, written, strict=True):
        if isinstance(factored, Factors):
            torch.testing.assert_close(factored.written(gradient), gradient)


def test_the_attack_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = GradientMatching(
        labels=Labels.KNOWN, iterations=30, optimizer=fp.attacks.Adam(signed=False), priors=(TotalVariation(1e-3),)
    )
    observation = observed(network())
    factored = fp.run(attack, observation, seed=0, device="cpu")
    monkeypatch.setattr(PreparedForward, "factoring", lambda self, shape: self)
    written = fp.run(attack, observation, seed=0, device="cpu")
    torch.testing.assert_close(factored.inputs, written.inputs)
    first = fp.run(dataclasses.replace(attack, iterations=1), observation, seed=0, device="cpu")
    assert factored.diagnostics["objective"] < 0.7 * first.diagnostics["objective"]


def test_a_weight_that_is_used_twice_is_written_down() -> None:
    prepared, labels = forwards(observed(Tied())), torch.tensor([0, 3])
    sent = dict(zip(prepared.forward.names, prepared.factoring((SIZE, 3, 4, 4))(guess(), labels), strict=True))
    inner = sent["inner.weight"]
    assert isinstance(inner, Tensor)
    assert isinstance(sent["last.weight"], Factors)
    torch.testing.assert_close(inner, prepared(guess(), labels)[prepared.forward.names.index("inner.weight")])


def test_what_a_defense_changes_is_written_down() -> None:
    prepared = forwards(observed(network(), defense=fp.defenses.Clip(0.1)))
    assert prepared.factoring((SIZE, 3, 4, 4)) is prepared


def test_factors_are_kept_where_they_save_work() -> None:
    weight = torch.empty(512, 512, 3, 3)
    assert factors.factors_are_cheaper(weight, 16)
    assert not factors.factors_are_cheaper(weight, 512)
    assert not factors.factors_are_cheaper(torch.empty(9, 9), 1)
