"""What closed forms may claim: planted updates whose rows agree, or fit, without the samples."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.base import READ_AS_SGD
from fedprism.attacks.certificate import left_by_noise, only_signs, unexplained
from fedprism.attacks.evidence import EXPLAINED_RESIDUAL, evidence
from fedprism.optimizers import SGD, Adam, AdamW, LocalOptimizer
from fedprism.solvers import DenseStatus

DIGITS = fp.data.load("digits", size=16)
FAR_OFF = 20.0
"""Decibels below which an answer is another picture: a grey square has about ten."""
CLAIMING = (DenseStatus.EXACT, DenseStatus.LAYER, DenseStatus.ELSEWHERE, DenseStatus.AGREED)


class Residual(nn.Module):
    """No plain stack of layers, so that rows are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(256, 400), nn.Linear(400, 400), nn.Linear(400, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        return self.last(hidden + torch.relu(self.second(hidden)))  # type: ignore[no-any-return]


def stack() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 16, 16), hidden=64, classes=10, seed=0)


def made(model: nn.Module, samples: int, *, told: bool = True, **options: Any) -> tuple[fp.Observation, fp.Truth]:
    batch = DIGITS.draw(samples, torch.Generator().manual_seed(1))
    scenario = fp.Scenario(model=model, clients=[batch], **options)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    return (observation if told else forgetting(observation)), truth


def loss_of(make: Any) -> dict[str, str]:
    """Squared error gives no labels away, so that nothing but rows is left."""
    return {"loss": "mse"} if make is Residual else {}


def forgetting(observation: fp.Observation) -> fp.Observation:
    return dataclasses.replace(observation, knowledge=dataclasses.replace(observation.knowledge, local_optimizer=None))


def worst(answer: fp.Reconstruction, truth: fp.Truth) -> float:
    return min(value for value in fp.score(answer, truth).values["psnr"] if value is not None)


@pytest.mark.parametrize("make", [stack, Residual])
@pytest.mark.parametrize("samples", [1, 2, 6])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("optimizer", [Adam(), AdamW(weight_decay=0.1), Adam(weight_decay=0.01)], ids=repr)
def test_an_unknown_optimizer_confirms_nothing(make: Any, samples: int, epochs: int, optimizer: LocalOptimizer) -> None:
    torch.manual_seed(0)
    protocol = fp.FedAvg(lr=1e-3, epochs=epochs, optimizer=optimizer)
    observation, truth = made(make(), samples, told=False, protocol=protocol, **loss_of(make))
    answer = fp.run(fp.attacks.dense_inversion(), observation)
    assert worst(answer, truth) < FAR_OFF
    assert answer.status.endswith(READ_AS_SGD)
    assert not answer.status.startswith(CLAIMING)
    assert not evidence(observation, answer).recovered


@pytest.mark.parametrize("name", ["dense-inversion", "cocktail-party", "row-space-inversion"])
def test_closed_forms_refuse_an_optimizer_that_scales_entries(name: str) -> None:
    observation, _ = made(stack(), 1, protocol=fp.FedAvg(lr=1e-3, optimizer=Adam()))
    with pytest.raises(fp.NotApplicable, match="train with Adam, which scales each entry by itself"):
        fp.run(fp.attacks.ATTACKS[name](), observation)


@pytest.mark.parametrize("make", [stack, Residual])
@pytest.mark.parametrize("samples", [1, 2, 6])
@pytest.mark.parametrize(
    "defense",
    [
        fp.defenses.SignCompression(),
        *(fp.defenses.Quantize(bits) for bits in (1, 2, 3, 4)),
        fp.chain(fp.defenses.Prune(0.9), fp.defenses.SignCompression()),
        fp.defenses.GaussianNoise(100.0),
    ],
    ids=repr,
)
def test_coarse_updates_and_noise_confirm_nothing(make: Any, samples: int, defense: fp.defenses.Defense) -> None:
    """Rounded to a few values, or to signs, many rows are the same: that is no confirmation."""
    torch.manual_seed(0)
    observation, _ = made(make(), samples, defense=defense, **loss_of(make))
    answer = fp.run(fp.attacks.dense_inversion(), observation)
    assert not answer.status.startswith(CLAIMING)
    assert not evidence(observation, answer).recovered


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [(SGD(), 0.0), (SGD(weight_decay=0.01), 0.0), (SGD(weight_decay=0.01), 0.9), (SGD(nesterov=True), 0.9)],
)
def test_sgd_is_read_through_weight_decay_and_momentum(
    samples: int, optimizer: LocalOptimizer, momentum: float
) -> None:
    """One step on any number of samples, and several on one, whose gradients all lie along the same input."""
    photos = fp.data.load("photos")
    epochs = 3 if samples == 1 else 1
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=10, seed=0)
    batch = photos.draw(samples, torch.Generator().manual_seed(1))
    protocol = fp.FedAvg(lr=0.01, epochs=epochs, momentum=momentum, optimizer=optimizer)
    scenario = fp.Scenario(model=model, clients=[batch], protocol=protocol)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    answer = fp.run(fp.attacks.dense_inversion(), observation)
    assert answer.status == DenseStatus.EXACT
    assert worst(answer, truth) > 100


def test_what_sgd_alone_would_justify_is_said_to_rest_on_it() -> None:
    """Two classes, one dense layer: an optimizer that scaled entries would make the same update of another picture."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    batch = DIGITS.batch([0])
    batch = fp.Batch(batch.inputs, batch.labels % 2)
    scenario = fp.Scenario(model=model, clients=[batch], protocol=fp.FedAvg(lr=0.1))
    known, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    assert unexplained(known, truth.inputs, truth.labels) == pytest.approx(0, abs=1e-5)
    assert unexplained(forgetting(known), truth.inputs, truth.labels) is None
    assert fp.run(fp.attacks.dense_inversion(), known).status == DenseStatus.EXACT
    unknown = fp.run(fp.attacks.dense_inversion(), forgetting(known))
    assert unknown.status == f"{DenseStatus.UNCONFIRMED}; {READ_AS_SGD}"


def test_the_mean_of_samples_that_nobody_counted_is_not_called_exact() -> None:
    """Two classes send opposite errors, so that the rows of any batch agree on one mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    batch = DIGITS.batch([0, 1, 2, 3])
    scenario = fp.Scenario(model=model, clients=[fp.Batch(batch.inputs, batch.labels % 2)])
    observation, truth = fp.simulate(scenario, fp.threats.eavesdropper, seed=0, device="cpu")
    answer = fp.run(fp.attacks.dense_inversion(), observation)
    assert worst(answer, truth) < FAR_OFF
    assert answer.status == DenseStatus.UNDETERMINED
    assert not evidence(observation, answer).recovered


def test_gradient_matching_runs_the_steps_of_adam() -> None:
    """Read as a gradient, the same update gives 9 dB."""
    model = fp.models.build("lenet", input_shape=(1, 8, 8), classes=10, seed=0)
    batch = fp.data.load("digits").batch([3])
    protocol = fp.FedAvg(lr=1e-3, epochs=3, optimizer=Adam())
    scenario = fp.Scenario(model=model, clients=[batch], protocol=protocol)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    attack = dataclasses.replace(fp.attacks.inverting_gradients(), iterations=100, starts=fp.attacks.Starts())
    answer = fp.run(attack, observation, device="cpu")
    assert "local_optimizer" in answer.knowledge_used
    assert worst(answer, truth) > 20
    with pytest.raises(fp.MissingKnowledge, match="local_optimizer"):
        fp.run(attack, forgetting(observation), device="cpu")


def test_a_deep_network_tells_an_unknown_step_of_sgd() -> None:
    observation, truth = made(stack(), 4, told=False, protocol=fp.FedAvg(lr=0.01))
    assert unexplained(observation, truth.inputs, truth.labels) == pytest.approx(0, abs=1e-3)


def test_samples_that_explain_steps_of_adam_in_any_size_are_not_told() -> None:
    """The client's own steps run on the wrong picture give its update: only signs of the input are in it."""
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=1)
    observation, truth = made(model, 1, protocol=fp.FedAvg(lr=1e-3, epochs=5, optimizer=Adam()))
    assert unexplained(observation, truth.tensor.sign(), truth.labels) is None
    assert not evidence(observation, fp.Reconstruction(inputs=truth.tensor.sign(), labels=truth.labels)).recovered


def test_samples_that_steps_of_adam_tell_apart_are_explained() -> None:
    observation, truth = made(stack(), 1, protocol=fp.FedAvg(lr=1e-3, epochs=5, optimizer=Adam()))
    assert unexplained(observation, truth.inputs, truth.labels) == pytest.approx(0, abs=1e-3)
    assert unexplained(observation, truth.tensor.flip(3), truth.labels) > EXPLAINED_RESIDUAL


def test_signs_are_told_by_the_sizes_of_entries() -> None:
    rng = torch.Generator().manual_seed(0)
    numbers = torch.randn(100, generator=rng)
    assert only_signs([numbers.sign(), 3 * numbers.sign()])
    assert only_signs([torch.cat([numbers.sign(), torch.zeros(50)])])
    assert not only_signs([numbers])
    assert not only_signs([torch.zeros(4)])


def test_adam_keeps_which_tokens_were_used() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens).mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    batch = fp.Batch(torch.tensor([[3, 7, 7, 20]]), torch.tensor([2]))
    for optimizer in (Adam(), AdamW(), Adam(weight_decay=0.1)):
        protocol = fp.FedAvg(lr=1e-3, epochs=3, optimizer=optimizer)
        scenario = fp.Scenario(model=Words(), clients=[batch], protocol=protocol)
        observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
        answer = fp.run(fp.attacks.embedding_inversion(), observation)
        assert set(answer.tensor.unique().tolist()) - {-1} == {3, 7, 20}
        assert "counts" in answer.ambiguity, "how often is in the sizes, which Adam does not keep"


def dense(*widths: int) -> nn.Module:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def in_place_of(observation: fp.Observation, update: dict[str, Tensor]) -> fp.Observation:
    return dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))


@pytest.mark.parametrize(
    ("widths", "told"),
    [((256, 1), False), ((256, 2), True), ((256, 1, 1), True), ((256, 1, 2), True), ((256, 2, 1), True)],
    ids=str,
)
@pytest.mark.parametrize("attack", [fp.attacks.dense_inversion(), fp.attacks.row_space_inversion(steps=10)], ids=repr)
def test_a_small_residual_means_nothing_where_noise_leaves_as_little(
    attack: fp.Attack, widths: tuple[int, ...], told: bool
) -> None:
    """With one output and nothing else any update is a multiple of some input; more numbers contradict noise."""
    torch.manual_seed(0)
    loss = {"loss": "binary_cross_entropy"} if widths[-1] == 1 else {}
    batch = fp.Batch(DIGITS.batch([0]).inputs, torch.ones(1) if loss else torch.ones(1).long())
    scenario = fp.Scenario(model=dense(*widths), clients=[batch], **loss)
    real, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    noise = in_place_of(real, {name: torch.randn_like(each) for name, each in real.round.update.items()})
    assert evidence(real, fp.run(attack, real)).recovered == told
    answer = fp.run(attack, noise)
    left = fp.residual(noise, answer)
    assert not evidence(noise, answer).recovered
    assert left is None or left > EXPLAINED_RESIDUAL
    assert told or left is None


def test_numbers_in_labels_may_fit_noise_too() -> None:
    """A measurement is one more number that an answer may choose."""
    torch.manual_seed(0)
    batch = fp.Batch(DIGITS.batch([0]).inputs, torch.tensor([0.3]))
    observation, truth = fp.simulate(
        fp.Scenario(model=dense(256, 1), clients=[batch], loss="mse"), fp.threats.honest_but_curious
    )
    assert left_by_noise(observation, truth.inputs, truth.labels) == 0
    assert fp.residual(observation, fp.Reconstruction(inputs=truth.inputs, labels=truth.labels)) is None


def test_silent_units_and_followed_zeros_contradict_nothing() -> None:
    """Ten outputs have 2,570 numbers for 256 of a sample; one row among zeros has 257, which is none to spare."""
    observation, truth = made(dense(256, 10), 1)
    assert left_by_noise(observation, truth.inputs, truth.labels) == pytest.approx((2313 / 2570) ** 0.5)
    update = {name: torch.zeros_like(each) for name, each in observation.round.update.items()}
    for each in update.values():
        each[3] = 1.0
    assert left_by_noise(in_place_of(observation, update), truth.inputs, truth.labels) == 0
    pruned, truth = made(dense(256, 10), 1, defense=fp.defenses.Prune(0.92))
    granted = dataclasses.replace(pruned.knowledge, defense=fp.defenses.Prune(0.92))
    assert left_by_noise(dataclasses.replace(pruned, knowledge=granted), truth.inputs, truth.labels) == 0
    assert left_by_noise(pruned, truth.inputs, truth.labels) > 0
