"""Rounds of a federation: who takes part, what they answer, and what the server makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.client.cohort import Task, local_updates
from fedprism.client.update import FedSGD
from fedprism.defenses.base import Context
from fedprism.errors import BadInput
from fedprism.randomness import generator
from fedprism.simulation.scenario import Scenario
from fedprism.types import Reduction, Update


class Draw(NamedTuple):
    """Which of its samples a client trained on in a round."""

    client: int
    round: int
    samples: Tensor


class Answer(NamedTuple):
    draw: Draw
    update: Update


def name_of(client: int) -> str:
    return f"client-{client}"


def participation(scenario: Scenario, seed: int) -> Tensor:
    """Who takes part: (rounds, clients) bool."""
    size = (scenario.rounds, len(scenario.clients))
    given = scenario.participation
    if given is None:
        return torch.ones(size, dtype=torch.bool)
    if isinstance(given, Tensor):
        return given.detach().cpu().bool()
    rng = generator(seed, "participation")
    chosen = torch.rand(size, generator=rng) < given
    empty = ~chosen.any(1)
    if scenario.aggregation != "sum" and bool(empty.any()):  # there is no mean over nobody
        chosen[empty] = _someone(int(empty.sum()), size[1], given, rng)
    if not bool(chosen.any()):
        raise BadInput(
            f"nobody takes part in {size[0]} rounds with participation {given}. Raise it, or take another seed."
        )
    return chosen


def answers(
    scenario: Scenario,
    model: nn.Module,
    params: Update,
    buffers: Update,
    cohorts: Iterable[tuple[int, Sequence[int]]],
    seed: int,
) -> Iterator[Answer]:
    """What clients answer who are sent `params`, on the CPU; `cohorts` says which clients take part in which round."""
    place = next(iter(model.parameters())).device
    draws: deque[Draw] = deque()  # of the clients whose answer is not there yet

    def tasks() -> Iterator[Task]:
        for index, cohort in cohorts:
            for client in cohort:
                rng = generator(seed, "client", name_of(client), "round", index)
                context = Context(model=model, params=params, client=name_of(client), round=index)
                draw = Draw(client, index, _samples(scenario, client, context, rng))
                draws.append(draw)
                batch = scenario.clients[client][draw.samples]
                yield Task(batch.to(place), rng, context, repeats=_repeats(scenario, len(batch)))

    updates = local_updates(
        model,
        _on(params, place),
        tasks(),
        loss=losses.resolve(scenario.loss),
        protocol=scenario.protocol,
        defense=scenario.defense,
        buffers=_on(buffers, place),
        trained=trained_names(model),
    )
    for _, update in updates:
        yield Answer(draws.popleft(), _on(update, torch.device("cpu")))


def trained_names(model: nn.Module) -> list[str]:
    """The parameters that clients train and send."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def part_size(scenario: Scenario, client: int) -> int:
    """How many samples a client's fraction of its data holds."""
    return max(1, round(scenario.fraction * len(scenario.clients[client])))


def aggregate(given: Sequence[Answer], reduction: Reduction) -> Update:
    """The sum or mean of at least one answer."""
    sizes = [len(answer.draw.samples) if reduction == "weighted_mean" else 1 for answer in given]
    weights = [size / (1 if reduction == "sum" else sum(sizes)) for size in sizes]
    return {
        name: torch.stack([w * answer.update[name] for w, answer in zip(weights, given, strict=True)]).sum(0)
        for name in given[0].update
    }


def step(params: Update, given: Sequence[Answer], scenario: Scenario) -> Update:
    """The next global model. Secure sums are divided by the number of clients before the step."""
    if scenario.frozen or not given:
        return params
    moved = aggregate(given, "weighted_mean" if scenario.aggregation == "weighted_mean" else "mean")
    factor = 1.0 if scenario.protocol.kind == "delta" else -scenario.protocol.lr
    return {name: p + factor * moved[name] if name in moved else p for name, p in params.items()}


def _someone(rounds: int, clients: int, probability: float, rng: torch.Generator) -> Tensor:
    """Rounds as they are drawn, given that someone takes part: who is first, and then each of those who come after."""
    order = torch.arange(clients)
    first = torch.multinomial((1 - probability) ** order.double(), rounds, replacement=True, generator=rng).unsqueeze(1)
    later = torch.rand((rounds, clients), generator=rng) < probability
    return (order == first) | ((order > first) & later)


def _samples(scenario: Scenario, client: int, context: Context, rng: torch.Generator) -> Tensor:
    """The samples that a client trains on in a round: its fraction, of which the defense may draw."""
    data = scenario.clients[client]
    if scenario.fraction == 1:
        return scenario.defense.on_draw(data, context, rng)
    part = torch.randperm(len(data), generator=rng)[: part_size(scenario, client)].sort().values
    return part[scenario.defense.on_draw(data[part], context, rng)]


def _repeats(scenario: Scenario, size: int) -> bool:
    """Whether a client with `size` samples trains in the same way every round: same model, samples and batches."""
    protocol = scenario.protocol
    in_order = isinstance(protocol, FedSGD) or not protocol.shuffle or (protocol.batch_size or size) >= size
    same_samples = scenario.fraction == 1 and not scenario.defense.overrides("on_draw")
    return scenario.frozen and scenario.rounds > 1 and in_order and same_samples


def _on(update: Update, device: torch.device) -> Update:
    return {name: tensor.to(device) for name, tensor in update.items()}
