"""Many clients' local training, all sent the same parameters: one tensor program for several of them on a GPU.

Each client draws its own random numbers however many train together, and sends what `client.local_update` says.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedprism.client.update import (
    FedAvg,
    Protocol,
    batch_gradient,
    local_update,
    stacked_gradients,
    step_indices,
    trained_update,
)
from fedprism.defenses.base import Chain, Context, Defense
from fedprism.inputs import first_tensor, outputs_of, stacked, tensors_of, values_in
from fedprism.randomness import seeded_layers
from fedprism.runtime import memory
from fedprism.types import Batch, LossFn, Update

BYTES_TOGETHER = 2**31
"""Bytes of GPU memory that clients trained together may take: a bound, so that other work fits beside them."""
MOST_TOGETHER = 1024
"""Clients trained together at most: a bound for tiny networks."""


class Task(NamedTuple):
    """One client's local training in one round."""

    data: Batch
    rng: torch.Generator
    context: Context
    repeats: bool = False
    """Whether this client's training comes out the same each time, random layers aside: it is then done once."""


def local_updates(
    model: nn.Module,
    params: Update,
    tasks: Iterable[Task],
    *,
    loss: LossFn,
    protocol: Protocol,
    defense: Defense | None = None,
    buffers: Update | None = None,
    trained: Collection[str] | None = None,
    together: int | None = None,
) -> Iterator[tuple[Task, Update]]:
    """Each task and the update that its client sends, in order: `local_update` under `seeded_layers(task.rng)`.

    At most `together` clients are trained at once: by default one on a CPU, on a GPU as many as BYTES_TOGETHER hold.
    """
    defense = defense or Chain()
    tasks = iter(tasks)
    begin = list(islice(tasks, 2))
    tasks = joined(begin, tasks)
    if together is None and begin and first_tensor(begin[0].data.inputs).device.type == "cpu":
        together = 1
    # Finding out whether the model allows it costs a gradient: only where there is something to gain.
    if len(begin) == 2 and (together != 1 or begin[0].repeats) and not defense.overrides("on_batch", "on_examples"):
        start = {name: p.detach() for name, p in params.items() if trained is None or name in trained}
        frozen = {name: p.detach() for name, p in params.items() if name not in start}
        # Copies, because whether a model writes into its buffers is tried.
        copies = {name: b.detach().clone() for name, b in (buffers or dict(model.named_buffers())).items()}
        training = _Training(model, start, {**frozen, **copies}, defense.on_loss(loss), protocol)
        if training.can_be_shared(begin[0].data):
            for task, update in training.run(tasks, together or training.fitting(begin[0].data)):
                about = task.context
                here = Context(model=model, params=params, batch=task.data, client=about.client, round=about.round)
                yield task, defense.on_update(update, here, task.rng)
            return
    for task in tasks:
        with seeded_layers(task.rng):
            answer = local_update(
                model,
                params,
                task.data,
                loss=loss,
                protocol=protocol,
                rng=task.rng,
                defense=defense,
                buffers=buffers,
                context=task.context,
                trained=trained,
            )
        yield task, answer.update


Key = str | int | None
"""Which update a task asks for: its client's where that is the same each time, else one of its own."""


@dataclass(frozen=True)
class _Training:
    """Local training of several clients on one model, before any defense looks at the update."""

    model: nn.Module
    start: Update
    held: Update
    loss: LossFn
    protocol: Protocol

    def can_be_shared(self, data: Batch) -> bool:
        """Whether one program can carry several clients through the model, tried with two clients of one sample."""
        if not self.start:
            return False
        before = {name: tensor.clone() for name, tensor in self.held.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                twice = _side_by_side([data[:1]] * 2)
                stacked_gradients(self.model, self._copies(2), self.held, twice, self.loss)
        except (RuntimeError, ValueError, TypeError, Warning):
            return False
        return all(torch.equal(tensor, before[name]) for name, tensor in self.held.items())

    def fitting(self, data: Batch) -> int:
        """How many clients who hold such data to train at once."""
        size = len(data)
        step = min(size, self.protocol.batch_size or size) if isinstance(self.protocol, FedAvg) else size
        # Parameters before, during and after a step, gradient and what the optimizer keeps; then activations, their
        # gradients and work space.
        kept = self.protocol.optimizer.tensors_kept if isinstance(self.protocol, FedAvg) else 1
        values = (5 + kept) * sum(p.numel() for p in self.start.values()) + 3 * step * self._activations(data)
        values += values_in(data.inputs) + 2 * step * values_in(data[:1].inputs)
        bytes_each = first_tensor(data.inputs).element_size()
        return memory.together(min(MOST_TOGETHER, BYTES_TOGETHER // (values * bytes_each)))

    def run(self, tasks: Iterable[Task], together: int) -> Iterator[tuple[Task, Update]]:
        """The tasks in order, `together` of them at a time; those of them whose data has one shape in one program."""
        numbered = enumerate(tasks)
        known: dict[Key, Update] = {}
        while chunk := list(islice(numbered, together)):
            alike: dict[Any, dict[Key, tuple[Batch, list[Tensor]]]] = {}
            for number, task in chunk:
                # Drawn also where the update is known already: the defense's random numbers come after these.
                with seeded_layers(task.rng):
                    steps = step_indices(len(task.data), self.protocol, task.rng)
                key = task.context.client if task.repeats else number
                if key not in known:
                    alike.setdefault(_shapes(task.data), {}).setdefault(key, (task.data, steps))
            for wanted in alike.values():
                data, schedules = zip(*wanted.values(), strict=True)
                known.update(zip(wanted, self._updates(data, schedules), strict=True))
            for number, task in chunk:
                yield task, known[task.context.client] if task.repeats else known.pop(number)

    def _updates(self, data: Sequence[Batch], schedules: Sequence[list[Tensor]]) -> list[Update]:
        """What each client has to send after its own steps; all data has one shape, and so do all schedules."""
        if len(data) == 1:
            only = data[0]
            start = {name: p.clone().requires_grad_() for name, p in self.start.items()}

            def alone(current: Update, indices: Tensor, _: int) -> Update:
                return batch_gradient(self.model, current, self.held, only[indices], self.loss)

            update = trained_update(start, alone, schedules[0], self.protocol)
            return [{name: tensor.detach() for name, tensor in update.items()}]
        every = _side_by_side(data)
        place = every.labels.device
        rows = torch.arange(len(data), device=place).unsqueeze(1)
        # One (clients, samples) table of indices per step.
        steps = [torch.stack(step).to(place) for step in zip(*schedules, strict=True)]

        def gradient(current: Update, indices: Tensor, _: int) -> Update:
            return stacked_gradients(self.model, current, self.held, every[rows, indices], self.loss)

        update = trained_update(self._copies(len(data)), gradient, steps, self.protocol)
        # Copies, so that one client's update does not keep those of all alive.
        return [
            {name: tensor[number].detach().clone() for name, tensor in update.items()} for number in range(len(data))
        ]

    def _copies(self, count: int) -> Update:
        """The parameters that are trained, once for each client: (clients, *shape)."""
        return {name: p.expand(count, *p.shape).clone().requires_grad_() for name, p in self.start.items()}

    def _activations(self, data: Batch) -> int:
        """How many numbers the layers put out for one sample."""
        counted = 0

        def count(_: nn.Module, __: Any, output: Any) -> None:
            nonlocal counted
            counted += output.numel() if isinstance(output, Tensor) else 0

        layers = [layer for layer in self.model.modules() if not any(layer.children())]
        hooks = [layer.register_forward_hook(count) for layer in layers]
        try:
            with torch.no_grad():
                outputs_of(self.model, {**self.start, **self.held}, data[:1].inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return counted


def _shapes(data: Batch) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in (*tensors_of(data.inputs), data.labels))


def _side_by_side(data: Sequence[Batch]) -> Batch:
    """Batches of one shape as (clients, batch, ...)."""
    return Batch(stacked(batch.inputs for batch in data), torch.stack([batch.labels for batch in data]))
