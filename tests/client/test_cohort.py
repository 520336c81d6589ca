"""Clients who train in one program send what they would send alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from federations import (
    CLASSES,
    SHUFFLED,
    batch,
    flat,
)
from fedprism.client.cohort import Task, local_updates
from fedprism.client.update import Protocol, local_update
from fedprism.defenses import Context
from fedprism.losses import cross_entropy
from fedprism.randomness import generator, seeded_layers


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(588, CLASSES))


def random_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


class Branches(nn.Module):
    """Something that no program for several clients can carry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.flatten(1))
        return outputs if outputs.sum() > 0 else 2 * outputs


NETWORKS = {
    "fc2": lambda: fp.models.build("fc2", input_shape=(1, 16, 16), hidden=6, classes=CLASSES, seed=0),
    "lenet5": lambda: fp.models.build("lenet5", input_shape=(1, 16, 16), classes=CLASSES, seed=0),
    "batch norm": normalised,
    "batch norm, evaluated": lambda: normalised().eval(),
    "dropout": random_layers,
    "branches": Branches,
}


@pytest.mark.parametrize("protocol", [fp.FedSGD(), SHUFFLED], ids=["gradient", "averaging"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("together", [1, 3, 100])
def test_clients_who_train_together_send_what_they_send_alone(together: int, name: str, protocol: Protocol) -> None:
    model, sizes = NETWORKS[name](), [4, 6, 4, 4, 6, 4, 5]
    data = [batch(size, number, side=16) for number, size in enumerate(sizes)]
    params = {name: p.detach() for name, p in model.named_parameters()}
    # Noise shows that not only the samples, but all random numbers are the same.
    options: Any = {"loss": cross_entropy, "protocol": protocol, "defense": fp.defenses.GaussianNoise(0.1)}
    alone = []
    for number, own in enumerate(data):
        with seeded_layers(rng := generator(0, number)):
            alone.append(local_update(model, params, own, rng=rng, **options).update)
    tasks = [Task(own, generator(0, number), Context()) for number, own in enumerate(data)]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    answered = list(local_updates(model, params, tasks, together=together, **options))
    assert [task for task, _ in answered] == tasks
    for (_, found), expected in zip(answered, alone, strict=True):
        torch.testing.assert_close(flat(found), flat(expected), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(("name", "fewer"), [("fc2", True), ("batch norm, evaluated", True), ("dropout", False)])
def test_together_means_one_program(name: str, fewer: bool) -> None:
    calls = 0

    def counting(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(outputs, labels)

    model = NETWORKS[name]()
    params = {name: p.detach() for name, p in model.named_parameters()}
    tasks = [Task(batch(4, number, side=16), generator(0, number), Context()) for number in range(10)]
    list(local_updates(model, params, tasks, loss=counting, protocol=fp.FedSGD(), together=5))
    alone = 10
    assert calls == (1 + 2 if fewer else alone)


def test_frozen_layers_and_soft_labels_train_together() -> None:
    model = NETWORKS["fc2"]()
    params = {name: p.detach() for name, p in model.named_parameters()}
    soft = [
        fp.Batch(b.inputs, nn.functional.one_hot(b.labels, CLASSES).float()) for b in (batch(4, 1, 16), batch(4, 2, 16))
    ]
    options: Any = {"loss": cross_entropy, "protocol": SHUFFLED, "trained": ["3.weight"]}
    tasks = [Task(own, generator(0, number), Context()) for number, own in enumerate(soft)]
    for number, (_, found) in enumerate(local_updates(model, params, tasks, together=2, **options)):
        with seeded_layers(rng := generator(0, number)):
            expected = local_update(model, params, soft[number], rng=rng, **options).update
        assert set(found) == {"3.weight"}
        torch.testing.assert_close(found["3.weight"], expected["3.weight"])
