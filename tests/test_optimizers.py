"""What clients step with: torch's own optimizers step by step, second derivatives, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.cohort import Task, local_updates
from fedprism.client.observed import direction, moved_by_decay
from fedprism.client.update import local_update
from fedprism.defenses import Context
from fedprism.errors import BadInput
from fedprism.losses import cross_entropy
from fedprism.optimizers import OPTIMIZERS, SGD, Adam, AdamW, LocalOptimizer, knowledge_of, name_of

Made = Callable[[Any], torch.optim.Optimizer]
RATE = 0.05

CASES: dict[str, tuple[LocalOptimizer, float, Made]] = {
    "sgd": (SGD(), 0.0, lambda p: torch.optim.SGD(p, lr=RATE)),
    "sgd with decay": (SGD(weight_decay=0.1), 0.0, lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.1)),
    "momentum": (SGD(weight_decay=0.1), 0.9, lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=0.1)),
    "nesterov": (
        SGD(nesterov=True, weight_decay=0.1),
        0.9,
        lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (Adam(), 0.0, lambda p: torch.optim.Adam(p, lr=RATE)),
    "adam with other settings": (
        Adam(beta1=0.7, beta2=0.9, epsilon=1e-3, weight_decay=0.1),
        0.0,
        lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": (AdamW(), 0.0, lambda p: torch.optim.AdamW(p, lr=RATE)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(size: int = 5) -> fp.Batch:
    rng = torch.Generator().manual_seed(1)
    return fp.Batch(torch.rand(size, 4, 4, generator=rng).double(), torch.randint(3, (size,), generator=rng))


def sent(model: nn.Module, batch: fp.Batch, protocol: fp.FedAvg, **options: Any) -> fp.types.Update:
    rng = torch.Generator().manual_seed(2)
    params = dict(model.named_parameters())
    return local_update(model, params, batch, loss=cross_entropy, protocol=protocol, rng=rng, **options).update


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_every_optimizer_steps_as_torch_does(name: str, epochs: int, batch_size: int | None) -> None:
    optimizer, momentum, make = CASES[name]
    model, batch = network(), samples()
    protocol = fp.FedAvg(
        lr=RATE, epochs=epochs, batch_size=batch_size, momentum=momentum, optimizer=optimizer, shuffle=False
    )
    update = sent(model, batch, protocol)
    trained = copy.deepcopy(model)
    reference = make(trained.parameters())
    for _ in range(epochs):
        for indices in torch.arange(len(batch)).split(batch_size or len(batch)):
            reference.zero_grad()
            nn.functional.cross_entropy(trained(batch.inputs[indices]), batch.labels[indices]).backward()  # type: ignore[index]
            reference.step()
    for (key, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(update[key], (after - before).detach(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_second_derivatives_agree_with_finite_differences(name: str, epsilon: float) -> None:
    """The update is itself made of gradients: its slopes in the inputs are second derivatives of the loss."""
    optimizer, momentum, _ = CASES[name]
    if isinstance(optimizer, Adam):
        optimizer = dataclasses.replace(optimizer, epsilon=epsilon)
    protocol = fp.FedAvg(lr=RATE, epochs=2, batch_size=2, momentum=momentum, optimizer=optimizer, shuffle=False)
    model, batch = network(), samples(3)

    def numbers(inputs: Tensor) -> Tensor:
        update = sent(model, fp.Batch(inputs, batch.labels), protocol, create_graph=True)
        return torch.cat([tensor.flatten()[:6] for tensor in update.values()])

    assert torch.autograd.gradcheck(numbers, (batch.tensor.clone().requires_grad_(),), eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("optimizer", [Adam(), AdamW()])
def test_entries_without_a_gradient_do_not_spoil_the_slopes(optimizer: LocalOptimizer) -> None:
    model, protocol = network(), fp.FedAvg(lr=RATE, epochs=2, optimizer=optimizer)
    inputs = samples().tensor.clone()
    inputs[:, 0] = 0  # the weights behind it have no gradient at all
    inputs.requires_grad_()
    update = sent(model, fp.Batch(inputs, samples().labels), protocol, create_graph=True)
    (slope,) = torch.autograd.grad(sum(tensor.sum() for tensor in update.values()), inputs)  # type: ignore[arg-type]
    assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("name", CASES)
def test_clients_that_train_together_send_the_same(name: str) -> None:
    optimizer, momentum, _ = CASES[name]
    protocol = fp.FedAvg(lr=RATE, epochs=2, batch_size=2, momentum=momentum, optimizer=optimizer)
    model, params = network(), dict(network().named_parameters())

    def updates(together: int) -> list[fp.types.Update]:
        tasks = (Task(samples(4), torch.Generator().manual_seed(k), Context(client=str(k))) for k in range(3))
        trained = local_updates(model, params, tasks, loss=cross_entropy, protocol=protocol, together=together)
        return [update for _, update in trained]

    for alone, together in zip(updates(1), updates(3), strict=True):
        for key in alone:
            torch.testing.assert_close(alone[key], together[key], rtol=1e-6, atol=1e-12)


# --- what is said of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_torch_optimizer_is_read_as_knowledge(name: str) -> None:
    optimizer, momentum, make = CASES[name]
    assert knowledge_of(make(network().parameters())) == {
        "local_lr": RATE,
        "local_momentum": momentum,
        "local_optimizer": optimizer,
    }


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.5), "dampening"),
        (lambda p: torch.optim.SGD([{"params": [next(iter(p))], "lr": 1.0}, {"params": list(p)}], lr=0.1), "groups"),
    ],
)
def test_an_optimizer_that_cannot_be_repeated_is_refused(make: Made, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        knowledge_of(make(network().parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_name_and_shows_how_it_is_made(name: str) -> None:
    optimizer = OPTIMIZERS[name](weight_decay=0.5)  # type: ignore[call-arg]
    assert name_of(optimizer) == name
    assert eval(repr(optimizer)) == optimizer


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"optimizer": "adam"}, "such as fp.optimizers.Adam"),
        ({"optimizer": Adam(), "momentum": 0.9}, "Adam takes none"),
        ({"optimizer": SGD(nesterov=True)}, "Nesterov's SGD needs momentum above 0"),
    ],
)
def test_training_that_does_not_fit_together_is_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        fp.FedAvg(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"epsilon": float("inf")},
        {"weight_decay": -1.0},
        {"beta1": True},
        {"epsilon": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        Adam(**wrong)


# --- weight decay, taken out of what is observed ---------------------------------------------------------------------


def seen(optimizer: LocalOptimizer, momentum: float = 0.0) -> fp.Observation:
    """One client's update; an unused row of the table moves by weight decay alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 3))
    batch = fp.Batch(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))
    protocol = fp.FedAvg(lr=RATE, epochs=3, batch_size=1, momentum=momentum, optimizer=optimizer)
    return fp.simulate(
        fp.Scenario(model=model, clients=[batch], protocol=protocol), fp.threats.honest_but_curious, device="cpu"
    )[0]


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [(SGD(weight_decay=0.1), 0.9), (Adam(weight_decay=0.1), 0.0), (AdamW(weight_decay=0.5), 0.0)],
)
def test_what_decay_alone_moves_is_taken_out(optimizer: LocalOptimizer, momentum: float) -> None:
    observation = seen(optimizer, momentum)
    assert bool(observation.round.update["0.weight"].all())
    rest = direction(observation.round, observation.knowledge)["0.weight"]
    assert bool((rest[4:] == 0).all())
    assert bool((rest[:4] != 0).all())


def test_decay_of_unknown_steps_stays() -> None:
    observation = seen(SGD(weight_decay=0.1))
    for unknown in ("local_lr", "local_epochs", "local_optimizer", "local_momentum"):
        assert not moved_by_decay(observation.round, dataclasses.replace(observation.knowledge, **{unknown: None}))
