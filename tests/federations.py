"""Small federations, and what their clients answer when they are asked one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import local_update
from fedprism.losses import cross_entropy
from fedprism.randomness import generator, seeded_layers
from fedprism.types import Update

CLASSES = 4
PARTICIPATION = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0]]).bool()
"""Five rounds of four clients: nobody in the third round, the last client never."""
SHUFFLED = fp.FedAvg(lr=0.1, epochs=2, batch_size=2, momentum=0.5)


def batch(size: int, seed: int, side: int = 4) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    return fp.Batch(torch.rand(size, 1, side, side, generator=rng), torch.randint(CLASSES, (size,), generator=rng))


def fc2() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 4, 4), hidden=5, classes=CLASSES, seed=0)


def federation(**changes: Any) -> fp.Scenario:
    settings: dict[str, Any] = {
        "model": fc2(),
        "clients": [batch(size, size) for size in (3, 4, 5, 6)],
        "rounds": 5,
        "participation": PARTICIPATION,
        "aggregation": "sum",
        "frozen": True,
        "window": 2,
    }
    return fp.Scenario(**{**settings, **changes})


def seen(scenario: fp.Scenario, threat: fp.ThreatModel, seed: int = 0) -> tuple[fp.Observation, fp.Truth]:
    return fp.simulate(scenario, threat, seed=seed, device="cpu")


def answer(scenario: fp.Scenario, client: int, index: int, seed: int = 0) -> Update:
    """What a client sends in a round, by `local_update` alone."""
    rng = generator(seed, "client", f"client-{client}", "round", index)
    with seeded_layers(rng):
        return local_update(
            scenario.model,
            dict(scenario.model.named_parameters()),
            scenario.clients[client],
            loss=cross_entropy,
            protocol=scenario.protocol,
            rng=rng,
            defense=scenario.defense,
        ).update


def total(updates: list[Update]) -> Update:
    return {name: torch.stack([update[name] for update in updates]).sum(0) for name in updates[0]}


def flat(update: Update) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in update.values()])


def assert_close(found: Update, expected: Update) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])
