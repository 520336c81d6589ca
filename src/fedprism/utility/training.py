"""Training under a defense by clients who send one gradient a step, with the simulator's and the attacks' client code.

The server steps with momentum along what was sent, at a rate that falls to zero along half a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.checks import whole
from fedprism.client.update import step_gradient
from fedprism.defenses import Chain, Context, Defense
from fedprism.errors import BadInput
from fedprism.inputs import tensors_of
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices, progress
from fedprism.types import Batch, LossFn, Update

Factory: TypeAlias = Callable[[int], nn.Module]
"""seed -> a network that has not been trained."""

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""(inputs (count, *input_shape), rng) -> inputs of the same shape, each changed on its own; rng lives on the CPU."""

MOST_EPOCHS = 10**6
"""Epochs of one training at most: a bound on input."""
MOST_SAMPLES = 2**31
"""Samples of one client's batch at most: a bound on input."""
MOST_CLIENTS = 2**20
"""Clients at most: a bound on input."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How networks are trained: in every step each client sends a gradient, and the server moves along their mean.

    Clients draw from the same data. Samples left over when it does not divide into steps sit that epoch out.
    """

    epochs: int = 30
    batch_size: int = 128
    clients: int = 1
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    loss: str | LossFn = "cross_entropy"
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        whole(self.epochs, "epochs", MOST_EPOCHS)
        whole(self.batch_size, "batch_size", MOST_SAMPLES)
        whole(self.clients, "clients", MOST_CLIENTS)
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise BadInput(
                f"lr must be above 0, momentum in [0, 1) and weight_decay at least 0, not {self.lr}, "
                f"{self.momentum} and {self.weight_decay}."
            )

    def client_batch(self, samples: int) -> int:
        """How many samples a client's batch has: fewer than it should where the data is too small."""
        return min(self.batch_size, samples // self.clients)

    def steps_an_epoch(self, samples: int) -> int:
        return samples // (self.clients * self.client_batch(samples))


def fit(
    model: nn.Module,
    data: Batch,
    defense: Defense | None = None,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    done: int = 0,
    total: int | None = None,
) -> nn.Module:
    """Train the model in place under the defense and return it; progress is reported as `done` of `total` epochs."""
    schedule = schedule or Schedule()
    run = Run(model, data, defense or Chain(), schedule, seed, devices.pick(device))
    with seeded_layers(generator(seed, "layers")):
        for epoch in range(schedule.epochs):
            for _ in run.epoch():
                pass
            progress.report(done + epoch + 1, total or schedule.epochs)
    for parameter in model.parameters():
        parameter.grad = None
    return model


class Run:
    """One training. `epoch` yields after every step, so that two trainings can take turns."""

    def __init__(
        self, model: nn.Module, data: Batch, defense: Defense, schedule: Schedule, seed: int, place: torch.device
    ) -> None:
        # Convolutions of a GPU are fastest with the channels of a pixel side by side.
        self._format = torch.channels_last if place.type == "cuda" else torch.contiguous_format
        self.model = model.to(place)
        if place.type == "cuda" and any(tensor.dim() == 4 for tensor in tensors_of(data.inputs)):
            self.model.to(memory_format=self._format)
        self.model.train()
        self.data = data.to(place)
        self.defense, self.schedule, self.place = defense, schedule, place
        self.loss = defense.on_loss(losses.resolve(schedule.loss))
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if not self.trained:
            raise BadInput("the model has no parameter to train: all are frozen. Unfreeze a layer.")
        # Batch norm writes into the buffers it is given: here they are the model's own, as training is to do.
        self.held: Update = {**self.frozen, **dict(model.named_buffers())}
        self.rng, self.order = generator(seed, "defense"), generator(seed, "order")
        self.augmenting = generator(seed, "augmentation")
        self.steps = 0
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)  # in the layout that a fused step asks for
        self.optimizer = torch.optim.SGD(
            self.trained.values(),
            lr=schedule.lr,
            momentum=schedule.momentum,
            weight_decay=schedule.weight_decay,
            fused=place.type in ("cpu", "cuda"),
        )

    def epoch(self) -> Iterator[None]:
        """Every step of one pass over the data, augmented as a whole so that whatever is mixed in is augmented too."""
        augment = self.schedule.augment
        epoch_data = self.data if augment is None else self.data.map(lambda t: augment(t, self.augmenting))
        for batches in self._rounds(epoch_data):
            self._step([self._answer(epoch_data, indices, client) for client, indices in enumerate(batches)])
            yield

    def _rounds(self, epoch_data: Batch) -> Iterator[list[Tensor]]:
        """Each client's samples, round by round: everyone's once an epoch or, where the defense draws, as it draws."""
        clients, size = self.schedule.clients, self.schedule.client_batch(len(epoch_data))
        for number in range(self.schedule.steps_an_epoch(len(epoch_data))):
            if self.defense.overrides("on_draw"):
                yield [self._drawn(epoch_data, client, size) for client in range(clients)]
                continue
            if number == 0:
                order = torch.randperm(len(epoch_data), generator=self.order)
            yield list(torch.split(order[number * clients * size : (number + 1) * clients * size], size))

    def _drawn(self, epoch_data: Batch, client: int, size: int) -> Tensor:
        drawn = self.defense.on_draw(epoch_data, self._context(client), self.rng)
        return drawn[torch.randperm(len(drawn), generator=self.order)[:size]]

    def _answer(self, epoch_data: Batch, indices: Tensor, client: int) -> Update:
        """What a client sends that trains on these samples."""
        context = self._context(client)
        gradient = step_gradient(
            self.trained,
            self.held,
            loss=self.loss,
            defense=self.defense,
            context=replace(context, batch=epoch_data, indices=indices, step=0),
            rng=self.rng,
            layout=self._format,
        )
        if not self.defense.overrides("on_update"):
            return gradient
        return self.defense.on_update(gradient, replace(context, batch=epoch_data[indices.to(self.place)]), self.rng)

    def _step(self, sent: Sequence[Update]) -> None:
        """Along the mean of what was sent, at the rate of this step."""
        total = self.schedule.epochs * self.schedule.steps_an_epoch(len(self.data))
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, self.steps / total)))
        sent = self.defense.on_aggregate(sent, self._context(None), self.rng)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                assert parameter.grad is not None
                mean = torch.stack([update[name] for update in sent]).mean(0) if len(sent) > 1 else sent[0][name]
                parameter.grad.copy_(mean)
        self.optimizer.step()
        self.steps += 1

    def _context(self, client: int | None) -> Context:
        return Context(
            model=self.model,
            params={**self.frozen, **self.trained},
            client=None if client is None else f"client-{client}",
            round=self.steps,
        )
