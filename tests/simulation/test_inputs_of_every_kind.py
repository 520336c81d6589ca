"""What models are fed and trained for, of every kind, through simulation, truth, certificate and score."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import fedprism as fp
from fedprism import losses
from fedprism.attacks.certificate import unexplained
from fedprism.inputs import are_floating, arguments, first_tensor, map_tensors, shape_of, tensors_of, types_of
from fedprism.types import Inputs
from planted_inputs import KINDS, Kind, build, scenario

each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


def equal(first: Inputs, second: Inputs) -> bool:
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return type(first) is type(second) and all(torch.equal(a, b) for a, b in pairs)


def autograd(kind: Kind, inputs: Inputs, labels: Tensor) -> dict[str, Tensor]:
    """The gradient, computed without fedprism's client."""
    model = build(kind)
    args, kwargs = arguments(inputs)
    losses.resolve(kind.loss)(model(*args, **kwargs), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@each_kind
def test_clients_send_the_gradient_that_autograd_gives(kind: Kind) -> None:
    observation, truth = fp.simulate(scenario(kind), fp.threats.honest_but_curious, seed=0)
    expected = autograd(kind, kind.inputs(3), kind.labels(3))
    for name, tensor in observation.round.update.items():
        torch.testing.assert_close(tensor, expected[name])
    assert observation.knowledge.input_shape == shape_of(kind.inputs(1))
    types = types_of(kind.inputs(1))
    assert observation.knowledge.input_types == (None if are_floating(types) else types)
    assert equal(truth.inputs, kind.inputs(3))


@each_kind
def test_single_examples_steps_and_cohorts_give_what_plain_training_gives(kind: Kind) -> None:
    clipped = scenario(kind, defense=fp.defenses.DpSgd(0.0, clip=1e9))
    observation, _ = fp.simulate(clipped, fp.threats.honest_but_curious, seed=0)
    alone = [
        autograd(kind, map_tensors(lambda t, n=n: t[n : n + 1], kind.inputs(3)), kind.labels(3)[n : n + 1])
        for n in range(3)
    ]
    for name, tensor in observation.round.update.items():
        torch.testing.assert_close(tensor, torch.stack([each[name] for each in alone]).mean(0), atol=1e-5, rtol=1e-4)
    steps = scenario(kind, protocol=fp.FedAvg(lr=0.5, epochs=2, batch_size=2, shuffle=False))
    observation, _ = fp.simulate(steps, fp.threats.honest_but_curious, seed=0)
    assert any(float(tensor.abs().max()) > 0 for tensor in observation.round.update.values())


@each_kind
def test_the_truth_is_certified_and_something_else_is_not(kind: Kind) -> None:
    observation, truth = fp.simulate(scenario(kind), fp.threats.honest_but_curious, seed=0)
    residual = unexplained(observation, truth.inputs, truth.labels)
    assert residual is not None
    assert residual < 1e-4
    other = map_tensors(lambda t: t.flip(-1) if t.is_floating_point() else (t + 1) % 5, truth.inputs)
    wrong = unexplained(observation, other, truth.labels)
    assert wrong is not None
    assert wrong > 1e-2


@each_kind
def test_the_truth_is_written_read_and_scored(kind: Kind, tmp_path: Path) -> None:
    _, truth = fp.simulate(scenario(kind), fp.threats.honest_but_curious, seed=0)
    fp.save_truth(truth, tmp_path / "truth")
    again = fp.load_truth(tmp_path / "truth")
    assert equal(truth.inputs, again.inputs)
    shuffled = map_tensors(lambda t: t[[2, 0, 1]], truth.inputs)
    answer = fp.Reconstruction(inputs=shuffled, ambiguity=frozenset({"order"}))
    scores = fp.score(answer, again)
    assert scores.rows == (1, 2, 0)
    if all(not tensor.is_floating_point() for tensor in tensors_of(truth.inputs)):
        assert "psnr" in scores.unavailable
    else:
        assert scores.mean("psnr") > 60
    if any(not tensor.is_floating_point() for tensor in tensors_of(truth.inputs)):
        assert scores.mean("tokens") == scores.mean("tokens-in-place") == 1
    else:
        assert "tokens" not in scores.values


def test_tokens_in_another_order_are_all_there_and_not_in_their_places() -> None:
    _, truth = fp.simulate(scenario(KINDS[0]), fp.threats.honest_but_curious, seed=0)
    inputs = first_tensor(truth.inputs)
    scores = fp.score(fp.Reconstruction(inputs=inputs.flip(1)), truth)
    assert scores.mean("tokens") == 1
    expected = (inputs == inputs.flip(1)).double().mean(1)
    assert scores.values["tokens-in-place"] == tuple(expected.tolist())
    none = fp.score(fp.Reconstruction(inputs=inputs[:1] * 0 - 1), truth)
    assert none.values["tokens"][0] == 0
    assert none.values["tokens"][1] is None


def test_a_structure_other_than_the_truth_is_refused() -> None:
    _, truth = fp.simulate(scenario(KINDS[2]), fp.threats.honest_but_curious, seed=0)
    with pytest.raises(fp.errors.BadInput, match="numbers"):
        fp.score(fp.Reconstruction(inputs=torch.zeros(3, 4)), truth)


def test_clients_of_tensors_by_name_train_together_as_they_do_alone() -> None:
    kind = KINDS[2]
    one = scenario(kind)
    several = dataclasses.replace(one, clients=[fp.Batch(kind.inputs(3), kind.labels(3))] * 3, rounds=3, frozen=True)
    observation, _ = fp.simulate(several, fp.threats.honest_but_curious, seed=0)
    expected = autograd(kind, kind.inputs(3), kind.labels(3))
    for round in observation.rounds:
        for name, tensor in round.update.items():
            torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "a tuple or dict"),
        ((torch.rand(2, 3), [1, 2]), "a tuple or dict"),
        ((torch.rand(2, 3), torch.rand(3, 3)), "as many of each"),
        ((torch.rand(2, 3), torch.full((2, 3), torch.inf)), "finite"),
    ],
)
def test_bad_structures_are_refused(inputs: Inputs, words: str) -> None:
    with pytest.raises(fp.errors.BadInput, match=words):
        fp.Scenario(model=build(KINDS[3]), clients=[fp.Batch(inputs, torch.ones(2))], loss=KINDS[3].loss)


def test_a_model_is_called_with_frozen_and_tied_parameters_in_place() -> None:
    kind = KINDS[0]
    frozen = scenario(kind)
    frozen.model.embedding.weight.requires_grad_(False)
    observation, _ = fp.simulate(frozen, fp.threats.honest_but_curious, seed=0)
    assert set(observation.round.update) == {"head.weight", "head.bias"}
    assert functional_call(frozen.model, dict(observation.round.params), (kind.inputs(1),)).shape == (1, 2)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]], ids=["text", "table", "pair"])
def test_no_ceiling_is_claimed_for_inputs_without_steps_between_them(kind: Kind) -> None:
    with pytest.raises(fp.errors.NotApplicable, match="no ceiling is known for such inputs"):
        fp.ceiling(scenario(kind, samples=1), fp.threats.honest_but_curious, seed=0)


def test_dropout_draws_in_train_mode_what_the_seed_says_and_nothing_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2))
    data = fp.Batch(torch.rand(4, 6), torch.tensor([0, 1, 1, 0]))

    def sent(seed: int, training: bool) -> Tensor:
        federation = fp.Scenario(model=model, clients=[data], training=training)
        return fp.simulate(federation, fp.threats.honest_but_curious, seed=seed)[0].round.update["0.weight"]

    assert torch.equal(sent(0, True), sent(0, True))
    assert not torch.equal(sent(0, True), sent(1, True))
    assert torch.equal(sent(0, False), sent(1, False))


def test_tied_weights_are_one_parameter_whose_gradient_is_the_sum_over_its_uses() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    data = fp.Batch(torch.rand(2, 4), torch.tensor([3, 1]))
    observation, truth = fp.simulate(fp.Scenario(model=model, clients=[data]), fp.threats.honest_but_curious, seed=0)
    assert set(observation.round.update) == {"0.weight", "0.bias", "2.bias"}
    expected = torch.autograd.grad(losses.cross_entropy(model(data.tensor), data.labels), model[0].weight)[0]
    torch.testing.assert_close(observation.round.update["0.weight"], expected)
    residual = unexplained(observation, truth.inputs, truth.labels)
    assert residual is not None
    assert residual < 1e-4


@pytest.mark.parametrize("samples", [1, 4])
def test_labels_of_tokens_may_be_larger_than_texts_are_long(samples: int) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(40, 6), torch.nn.Linear(6, 40))
    rng = torch.Generator().manual_seed(0)
    batch = fp.Batch(*(torch.randint(0, 40, (samples, 5), generator=rng) for _ in range(2)))
    batch.labels[0, 0] = 39
    observation, _ = fp.simulate(fp.Scenario(model=model, clients=[batch]), fp.threats.honest_but_curious, seed=0)
    assert bool(observation.round.update["1.weight"].any())
