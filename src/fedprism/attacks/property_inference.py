"""Tells whether the data behind an update has a property, by comparison with clients that the attacker makes up.

Melis, Song, De Cristofaro, Shmatikov, "Exploiting Unintended Feature Leakage in Collaborative Learning", S&P 2019; on
disaggregated updates by Lam et al., "Gradient Disaggregation", ICML 2021.

Differs from the papers in: made-up clients train with the same code as real ones; for an aggregate they are aggregated
to cohorts of its size, of which one client has the property or none; properties are planted ones, such as a class or a
rendering of the images, never attributes of people.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.base import Attack, Circumstances
from fedprism.attacks.choices import OneOf
from fedprism.attacks.gradient_matching.forward import FORWARD_NEEDS, FORWARD_USES, input_box, local_protocol
from fedprism.client.cohort import Task, local_updates
from fedprism.client.update import FedAvg, FedSGD
from fedprism.defenses.base import Context
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.naming import preset
from fedprism.runtime import progress
from fedprism.solvers.properties import WIDEST, infer_property, telling_tensors, update_features
from fedprism.types import Batch, Observation, Reconstruction, Round, Update, is_soft, same_tensors

FEWEST_SHADOWS = 20
"""Made-up clients that it takes to tell two kinds apart: a bound."""


class Property(Protocol):
    """Something that samples may have: makes samples with it and samples without it out of any data."""

    def split(self, data: Batch, box: tuple[Tensor, Tensor] | None) -> tuple[Batch, Batch]:
        """(with, without); `box` is the pixel range in the model's input space, where it is known."""
        ...


@dataclass(frozen=True)
class HoldsClass:
    """The sample is of this class."""

    label: int = 0

    def split(self, data: Batch, box: tuple[Tensor, Tensor] | None) -> tuple[Batch, Batch]:
        classes = data.labels.argmax(1) if is_soft(data.labels) else data.labels
        return data[classes == self.label], data[classes != self.label]


@dataclass(frozen=True)
class Negative:
    """The image is rendered as its negative."""

    def split(self, data: Batch, box: tuple[Tensor, Tensor] | None) -> tuple[Batch, Batch]:
        low, high = (bound.to(data.tensor) for bound in box) if box else (data.tensor.min(), data.tensor.max())
        return Batch(low + high - data.tensor, data.labels), data


PROPERTIES = {"holds-class": HoldsClass(), "negative": Negative()}


@dataclass(frozen=True, kw_only=True, repr=False)
class PropertyInference(Attack):
    """How likely each update's client, or a client in each aggregate's cohort, holds samples with the property.

    `public_data` are dealt out to `shadows` made-up clients; half of them have it in `fraction` of their samples.
    widest: weight tensors with more connections are left out.
    """

    sought: Annotated[Property, OneOf(PROPERTIES)] = HoldsClass()
    fraction: float = 0.5
    shadows: int = 200
    widest: int = WIDEST

    citation: ClassVar[str] = "Melis et al. 2019 (property inference)"

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1 or self.shadows < FEWEST_SHADOWS or self.widest < 1:
            raise BadInput(
                f"fraction must be in (0, 1], shadows at least {FEWEST_SHADOWS} and widest at least 1, "
                f"not {self.fraction}, {self.shadows} and {self.widest}; change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        return FORWARD_NEEDS | {"public_data", "batch_size"}

    @property
    def uses(self) -> frozenset[str]:
        return FORWARD_USES | {"bounds", "normalization", "input_shape"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return "it looks for a property, which a plan must name, and needs data.public"

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        rounds = observation.rounds
        try:
            names = telling_tensors(rounds[0].update, widest=self.widest)
        except ValueError as error:
            raise NotApplicable(str(error)) from error
        pools = self._pools(observation)
        situations = _situations(self, observation)
        probabilities = torch.zeros(len(rounds), dtype=torch.float64)
        answers = {}
        clients: dict[tuple[int, int], _Shadows] = {}
        seed = int(torch.randint(2**31, (), generator=rng))
        for situation, members in situations.items():
            made_up = (situation.model, situation.size)
            if made_up not in clients:
                clients[made_up] = self._shadow_clients(observation, rounds[members[0]], names, situation, pools, rng)
            examples, marks = clients[made_up].cohorts(situation.clients, rng)
            observed = {name: torch.stack([rounds[number].update[name] for number in members]) for name in names}
            answer = infer_property(update_features(examples), marks, update_features(observed), seed=seed)
            probabilities[members] = answer.probabilities
            answers[situation] = answer
        separation = [
            {"clients": key.clients, "samples": key.size, "auc": answer.separation} for key, answer in answers.items()
        ]
        return Reconstruction(
            properties=probabilities,
            owners=tuple(map(_owner, rounds)),
            status="; ".join(dict.fromkeys(str(answer.status) for answer in answers.values())),
            diagnostics={"separation": separation},
        )

    def _pools(self, observation: Observation) -> tuple[Batch, Batch]:
        """The attacker's own samples, with and without the property, where the model can be fed them."""
        data = observation.knowledge.public_data
        if data is None:
            raise MissingKnowledge(self.name, "public_data")
        like = next(iter(observation.rounds[0].params.values()))
        holding, plain = self.sought.split(
            Batch(data.tensor.to(like), data.labels.to(like.device)), input_box(observation)
        )
        if not len(holding) or not len(plain):
            raise BadInput(
                f"public_data must hold samples with and without the property {self.sought!r}, not {len(holding)} and "
                f"{len(plain)} of these; give data with both, or name another property."
            )
        return holding, plain

    def _shadow_clients(
        self,
        observation: Observation,
        round_: Round,
        names: Sequence[str],
        situation: _Situation,
        pools: tuple[Batch, Batch],
        rng: torch.Generator,
    ) -> _Shadows:
        """What made-up clients would have sent, of the tensors in `names`."""
        holding, plain = pools
        half, with_it = self.shadows // 2, max(1, round(self.fraction * situation.size))
        datasets = (
            _joined(_drawn(holding, count, rng), _drawn(plain, situation.size - count, rng))
            for count in [with_it] * half + [0] * half
        )
        updates = list[list[Tensor]]()
        for done, update in enumerate(_answers(observation, round_, datasets, rng), start=1):
            updates.append([update[name] for name in names])
            progress.report(done, 2 * half)
        stacked = dict(zip(names, map(torch.stack, zip(*updates, strict=True)), strict=True))
        return _Shadows({n: t[:half] for n, t in stacked.items()}, {n: t[half:] for n, t in stacked.items()})


@preset(PropertyInference)
def property_inference() -> PropertyInference:
    """Whether clients hold samples of class 0, or of another property, by comparison with made-up clients."""
    return PropertyInference()


class _Situation(NamedTuple):
    """What updates must have in common to be compared with the same made-up ones."""

    model: int
    """Number of the first round that was sent the same parameters."""
    clients: int
    size: int
    """Samples a client."""


class _Shadows(NamedTuple):
    """Updates of made-up clients, (clients, *shape) under each name: those that have the property, and the others."""

    holding: dict[str, Tensor]
    plain: dict[str, Tensor]

    def cohorts(self, clients: int, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Sums over cohorts, and whether one client in each has the property; the others never have it."""
        half = len(next(iter(self.plain.values())))
        # A cohort without the property has all its clients from the plain ones, so that both kinds are sums alike.
        others = torch.randint(half, (2 * half, clients - 1), generator=rng)
        sums = {}
        for name, plain in self.plain.items():
            first = torch.cat([self.holding[name], plain])
            sums[name] = first + torch.stack([plain[chosen].sum(0) for chosen in others.to(plain.device)])
        return sums, torch.arange(2 * half) < half


def _situations(attack: PropertyInference, observation: Observation) -> dict[_Situation, list[int]]:
    """Numbers of the rounds by situation; a round without clients has none."""
    rounds, sizes = observation.rounds, observation.knowledge.batch_size
    if sizes is None:
        raise MissingKnowledge(attack.name, "batch_size")
    models: list[int] = []
    situations: dict[_Situation, list[int]] = {}
    for number, round_ in enumerate(rounds):
        size = sizes[number] if isinstance(sizes, tuple) else sizes
        if round_.clients == 0 or size == 0:
            continue
        models.append(number)
        model = next(first for first in models if same_tensors(rounds[first].params, round_.params))
        situation = _Situation(model, round_.clients, max(1, round(size / round_.clients)))
        situations.setdefault(situation, []).append(number)
    return situations


def _answers(
    observation: Observation, round_: Round, datasets: Iterable[Batch], rng: torch.Generator
) -> Iterator[Update]:
    """What clients that hold these data send, in order."""
    model, knowledge = observation.model, observation.knowledge
    if model is None or knowledge.loss is None:
        raise MissingKnowledge("property-inference", "model" if model is None else "loss")
    protocol: FedSGD | FedAvg = FedSGD()
    if round_.kind == "delta":
        protocol = replace(local_protocol(observation, replace(round_, clients=1)), shuffle=True)

    def task(data: Batch) -> Task:
        seed = int(torch.randint(2**62, (), generator=rng))
        return Task(data, torch.Generator().manual_seed(seed), Context())

    trained = local_updates(
        model,
        round_.params,
        map(task, datasets),
        loss=losses.resolve(knowledge.loss),
        protocol=protocol,
        defense=knowledge.defense,
        buffers=round_.buffers_before,
        trained=tuple(round_.update),
    )
    return (update for _, update in trained)


def _drawn(data: Batch, count: int, rng: torch.Generator) -> Batch:
    """Different samples, or repeated ones where there are too few."""
    order = torch.randperm(len(data), generator=rng)
    return data[order.repeat(-(-count // len(data)))[:count].to(data.labels.device)]


def _joined(first: Batch, second: Batch) -> Batch:
    return Batch(torch.cat([first.tensor, second.tensor]), torch.cat([first.labels, second.labels]))


def _owner(round_: Round) -> str:
    return round_.participants[0] if round_.clients == 1 and round_.participants else f"round {round_.index}"
