"""Gradient matching by differences: the slope is that of differentiating twice; what cannot be held is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import BatchNorm, Engine, GradientMatching, Labels, Pull, TotalVariation, cosine
from fedprism.attacks.gradient_matching.forward import PreparedForward, forward_model
from fedprism.attacks.gradient_matching.two_losses import ClientLosses
from fedprism.defenses import Clip, Defense, Prune
from fedprism.solvers import squared_error
from fedprism.solvers.matching.differences import ROUGH_STEP, STEP, Differenced
from fedprism.solvers.matching.distances import Distance, slope_towards
from fedprism.solvers.matching.gradients import LBFGS, Adam
from fedprism.solvers.matching.objective import Objective

SIDE, CLASSES = 12, 5
EXACT = Engine(differences=False)


class Written(nn.Module):
    """A layer that is only a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def in_place(inputs: Tensor) -> Tensor:
    F.relu(inputs, inplace=True)  # what it returns is not looked at
    return inputs


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    last = [nn.Conv2d(8, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *middle, *last).eval()
    model(torch.zeros(1, 3, SIDE, SIDE))  # the last layer is made when it is first asked
    return model


HELD = {
    "relu": network(nn.ReLU()),
    "relu in place": network(nn.ReLU(inplace=True)),
    "relu_": network(Written(torch.Tensor.relu_)),
    "in place, and not returned": network(Written(in_place)),
    "leaky": network(nn.LeakyReLU(0.2), nn.BatchNorm2d(8), nn.LeakyReLU(0.1, inplace=True)),
    "pooling": network(nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)),
    "batch norm": network(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), nn.ReLU()),
    "dropout that does nothing": network(nn.Sigmoid(), nn.Dropout(0.0)),
    "no kink": network(nn.Sigmoid(), nn.AvgPool2d(2), nn.GroupNorm(2, 8)),
}
UNHELD = {
    "abs": network(Written(torch.abs)),
    "sides taken in the open": network(Written(lambda x: x * (x > 0))),
    "where": network(Written(lambda x: torch.where(x > 0, x, 2 * x))),
    "hardtanh": network(nn.Hardtanh()),
    "dropout": network(nn.Dropout(0.3)),
    "noise": network(Written(lambda x: x + 0.1 * torch.randn_like(x))),
}


def batch_of(size: int, rng: torch.Generator) -> fp.Batch:
    return fp.Batch(torch.rand(size, 3, SIDE, SIDE, generator=rng), torch.arange(size) % CLASSES)


def observed(
    model: nn.Module, batch: fp.Batch, *, training: bool = False, defense: Defense | None = None
) -> fp.Observation:
    scenario = fp.Scenario(
        model=copy.deepcopy(model),
        clients=[batch],
        training=training,
        defense=defense or fp.chain(),
        normalization=((0.0,) * 3, (1.0,) * 3),
    )
    return fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels", "defense", "batchnorm_exact"))[0]


def slopes(
    observation: fp.Observation,
    batch: fp.Batch,
    rng: torch.Generator,
    *,
    distance: Distance = cosine,
    hold: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The objective and its slope at a random guess, by differentiating twice and by a difference."""
    forward = forward_model(observation, observation.rounds[0])
    prepared, guess = PreparedForward(forward), torch.rand(batch.inputs.shape, generator=rng).requires_grad_()
    client = ClientLosses(prepared, batch)
    assert not client.refusal
    losses = client.of(lambda logits, which: batch.labels[which])
    losses = losses if hold else losses._replace(kinked=False)
    prior = (TotalVariation(1e-3),)
    towards = slope_towards(distance, forward.target)
    value, exact = Objective(guess, None, lambda x, _: prepared(x, batch.labels), towards, prior)()
    by_difference = Differenced(guess, None, losses, towards, prior)
    near, difference = by_difference()
    torch.testing.assert_close(by_difference.value(), value, rtol=1e-4, atol=1e-6)
    return value, exact[0], near, difference[0]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("model", HELD.values(), ids=HELD)
def test_the_difference_is_the_slope(model: nn.Module, training: bool, rng: torch.Generator) -> None:
    batch = batch_of(4, rng)
    value, exact, near, difference = slopes(observed(model, batch, training=training), batch, rng)
    torch.testing.assert_close(near, value, rtol=1e-4, atol=1e-6)
    assert off(difference, exact) < 0.02
    assert (difference.sign() == exact.sign()).float().mean() > 0.98


@pytest.mark.parametrize("distance", [cosine, squared_error])
@pytest.mark.parametrize("defense", [Clip(0.1), Prune(0.5), fp.chain(Clip(0.1), Prune(0.5))], ids=str)
def test_the_difference_goes_through_a_known_defense(
    distance: Distance, defense: Defense, rng: torch.Generator
) -> None:
    batch = batch_of(3, rng)
    value, exact, near, difference = slopes(
        observed(HELD["relu"], batch, defense=defense), batch, rng, distance=distance
    )
    torch.testing.assert_close(near, value, rtol=1e-4, atol=1e-6)
    assert off(difference, exact) < 0.02


@pytest.mark.parametrize("labels", [Labels.KNOWN, Labels.JOINT])
@pytest.mark.parametrize("model", [HELD["pooling"], HELD["no kink"]], ids=["kinks", "none"])
def test_parts_lead_where_the_whole_batch_leads(model: nn.Module, labels: Labels, rng: torch.Generator) -> None:
    batch = batch_of(5, rng)
    observation = observed(copy.deepcopy(model).double(), fp.Batch(batch.inputs.double(), batch.labels))
    attack = GradientMatching(labels=labels, iterations=10, lr=0.02, priors=(TotalVariation(1e-4),))
    answers = [
        fp.run(dataclasses.replace(attack, engine=Engine(memory=memory)), observation, seed=0) for memory in (None, 1)
    ]
    whole, parts = (answer.inputs for answer in answers)
    assert "1 of the 5 samples at a time" in answers[1].status
    assert {answer.diagnostics["slopes"] for answer in answers} == {"the difference of two gradients"}
    torch.testing.assert_close(parts, whole, rtol=1e-7, atol=1e-9)


@pytest.mark.quality
def test_kinks_that_are_not_held_spoil_the_difference(rng: torch.Generator) -> None:
    """The reason for holding them. Few guesses lie so near to no kink that none is crossed: four do not all."""
    batch = batch_of(128, rng)
    observation = observed(HELD["batch norm"], batch)
    wrong = dict[bool, list[float]]()
    for seed in range(4):
        for hold in (True, False):
            _, exact, _, found = slopes(observation, batch, torch.Generator().manual_seed(seed), hold=hold)
            wrong.setdefault(hold, []).append(off(found, exact))
    # Over 64 guesses 0.0004 to 0.0013 held; not held, the worst of four 7 to 35.
    assert max(wrong[True]) < 0.02 < 0.5 < max(wrong[False])


@pytest.mark.parametrize("model", UNHELD.values(), ids=UNHELD)
def test_what_cannot_be_held_is_differentiated(model: nn.Module, rng: torch.Generator) -> None:
    batch = batch_of(2, rng)
    observation = observed(model, batch, training=True)
    found = fp.run(GradientMatching(labels=Labels.KNOWN, iterations=2), observation)
    assert found.diagnostics["slopes"].startswith("exact, because no difference can be taken")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": LBFGS(), "iterations": 1}, "steps do not follow signs"),
        ({"optimizer": Adam(signed=False)}, "steps do not follow signs"),
        ({"engine": EXACT}, "as the engine asks"),
        ({"engine": Engine(tf32=True)}, "the difference of two gradients"),
        ({"engine": Engine(channels_last=True)}, "the difference of two gradients"),
        ({}, "the difference of two gradients"),
    ],
)
def test_the_answer_says_how_its_slopes_were_found(changes: dict[str, object], says: str, rng: torch.Generator) -> None:
    batch = batch_of(3, rng)
    attack = dataclasses.replace(GradientMatching(labels=Labels.KNOWN, iterations=2), **changes)  # type: ignore[arg-type]
    assert says in fp.run(attack, observed(HELD["relu"], batch)).diagnostics["slopes"]


@pytest.mark.quality
@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, STEP), ({"labels": Labels.JOINT}, STEP), ({"batchnorm": BatchNorm(pull=Pull.EXACT)}, STEP), ({}, ROUGH_STEP)],
    ids=["labels known", "labels looked for", "batch norm pulled", "the longer step of TF32"],
)
def test_images_are_found_as_well_as_by_differentiating_twice(
    changes: dict[str, object], length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps along signs take either far from the other, and rounding does as well: how far beyond 25 dB is chance.

    With what lies beyond cut off, 48 pairs of photographs differ by 3 dB at most.
    """
    monkeypatch.setattr("fedprism.solvers.matching.gradients.STEP", length)
    attack = GradientMatching(labels=Labels.KNOWN, lr=0.03, iterations=200, priors=(TotalVariation(1e-4),))
    attack = dataclasses.replace(attack, **changes)  # type: ignore[arg-type]
    scores = dict[bool, list[float]]()
    for number in range(3):
        photo = fp.data.load("photos", size=SIDE).batch(torch.tensor([number]))
        batch = fp.Batch(photo.inputs, torch.zeros(1, dtype=torch.long))
        observation = observed(HELD["batch norm"], batch)
        for differences in (True, False):
            engine = dataclasses.replace(attack.engine, differences=differences)
            found = fp.run(dataclasses.replace(attack, engine=engine), observation, seed=number)
            assert found.inputs is not None
            score = -10 * (found.inputs - batch.inputs).square().mean().log10()
            scores.setdefault(differences, []).append(min(float(score), 25.0))
    difference, exact = (sum(values) / len(values) for values in (scores[True], scores[False]))
    assert difference > 12
    assert difference > exact - 3


def test_neither_the_model_nor_its_buffers_change(rng: torch.Generator) -> None:
    batch = batch_of(4, rng)
    observation = observed(HELD["batch norm"], batch, training=True)
    model = observation.model
    assert model is not None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fp.run(GradientMatching(labels=Labels.KNOWN, iterations=3), observation)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
