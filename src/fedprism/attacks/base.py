"""What an attack is, and how attacks are combined."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedprism.client.observed import adds_gradients
from fedprism.errors import NotApplicable
from fedprism.inputs import first_tensor
from fedprism.inputs import joined as join_batches
from fedprism.naming import EvaluableRepr
from fedprism.types import Ambiguity, Observation, Reconstruction

PER_UPDATE = ("batch_size", "labels", "batchnorm_exact")
"""Knowledge about one update: a tuple with one entry per round where there are several."""


READ_AS_SGD = "the clients' optimizer is not known: the update was read as a sum of gradients, as SGD sends"
"""Added to the status of attacks that read updates so."""
NO_DENSE_LAYER = "the input feeds no dense layer of this model"
NOBODY_TAMPERS = "nobody in this plan tampers"


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What decides, before anything is simulated, whether an attack is worth trying."""

    dense_layer_first: bool
    """Whether the input feeds a dense layer, as closed forms need."""
    looks_up: bool
    """Whether entries of the input are looked up in tables."""
    patches_first: bool
    """Whether the input feeds a layer of patches that a position parameter or an attention layer opens."""
    few_places: bool
    """Whether the input feeds a layer at fewer places than it has units."""
    batchnorm_between: bool
    """Whether batch norm stands between an update and what is fed to the model."""
    tampers: bool
    """Whether an attacker changes what clients receive."""
    mixes: bool
    """Whether a client mixes samples."""
    sums_of_rounds: bool
    """Whether there are sums of several rounds of one model, and something that says who took part in them."""


class _Method(EvaluableRepr, ABC):
    """Something that reads observations: it says which knowledge it needs and which it can use."""

    citation: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def needs(self) -> frozenset[str]:
        """Knowledge fields (and "model", "trapdoor") without which this method refuses."""
        return frozenset()

    @property
    def uses(self) -> frozenset[str]:
        """Knowledge fields that help where they are granted. The runner hands on nothing but needs and uses."""
        return frozenset()


class Attack(_Method):
    """Turns an observation into a reconstruction.

    Subclasses are frozen keyword-only dataclasses (with repr=False) whose fields are hyper-parameters. They see no
    truth: what they return is chosen by their own objective.
    """

    @property
    def reads_any_inputs(self) -> bool:
        """Whether it also reads models that are fed several tensors, or whole numbers; others are refused for it."""
        return False

    @abstractmethod
    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction: ...

    def not_worth(self, circumstances: Circumstances) -> str | None:
        """Why an audit whose plan names no attacks leaves this one out; None if it is worth trying."""
        return "not tested unless the plan names it"


class UpdateAttack(Attack):
    """An attack on one update: `run` answers for every update of an observation by itself and joins the answers.

    Updates of clients whose optimizer scales each entry by itself, such as Adam, are refused unless
    `reads_scaled_updates`. Where the optimizer is not known, the status says how the update was read.
    """

    @property
    def reads_scaled_updates(self) -> bool:
        """Whether it can read updates that are no sum of gradients; most closed forms cannot."""
        return False

    @final
    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        if len(observation.rounds) == 1:
            return self._answer(observation, rng)
        parts = split_updates(observation)
        return _joined_answers(parts, [self._answer(part, rng) for part in parts])

    def _answer(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        summed = adds_gradients(observation.round, observation.knowledge)
        if summed is False and not self.reads_scaled_updates:
            optimizer = type(observation.knowledge.local_optimizer).__name__
            raise NotApplicable(
                f"{self.name} expects updates that are sums of gradients, found clients that train with {optimizer}, "
                "which scales each entry by itself; use gradient-matching instead."
            )
        answer = self.attack_update(observation, rng)
        if summed is None:
            return dataclasses.replace(answer, status=f"{answer.status}; {READ_AS_SGD}")
        return answer

    @abstractmethod
    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        """The answer for the one update of the observation, `observation.round`; what is known is about it alone."""


class Reduced(NamedTuple):
    parts: tuple[Observation, ...]
    status: str = ""
    """How far the parts can be trusted, and what could not be told apart; empty where there is nothing to say."""
    diagnostics: Mapping[str, Any] = MappingProxyType({})


class Reduction(_Method):
    """Turns one observation into several simpler ones, such as one for each user."""

    @abstractmethod
    def reduce(self, observation: Observation) -> tuple[Observation, ...]: ...

    def explained(self, observation: Observation) -> Reduced:
        """The same parts with a status, for reductions that have one."""
        return Reduced(self.reduce(observation))


def then(reduction: Reduction, attack: Attack) -> Attack:
    """The attack that first reduces the observation and then attacks its parts: all of them together, unless it is an
    `UpdateAttack`."""
    return Then(reduction=reduction, attack=attack)


@dataclass(frozen=True, kw_only=True, repr=False)
class Then(Attack):
    """Build it with `then`."""

    reduction: Reduction
    attack: Attack

    def __repr__(self) -> str:
        return f"then({self.reduction!r}, {self.attack!r})"

    @property
    def needs(self) -> frozenset[str]:
        return self.reduction.needs | self.attack.needs

    @property
    def uses(self) -> frozenset[str]:
        return self.reduction.uses | self.attack.uses

    @property
    def reads_any_inputs(self) -> bool:
        return self.attack.reads_any_inputs

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        parts, status, diagnostics = self.reduction.explained(observation)
        if isinstance(self.attack, UpdateAttack) or not parts:
            return _joined_answers(parts, [self.attack.run(part, rng) for part in parts], status, diagnostics)
        answer = self.attack.run(joined(parts), rng)
        return dataclasses.replace(
            answer,
            ambiguity=answer.ambiguity | {"order"},
            status="; ".join(filter(None, [status, answer.status])),
            diagnostics={**diagnostics, "parts": [answer.diagnostics]},
        )


def _joined_answers(
    parts: Sequence[Observation],
    answers: Sequence[Reconstruction],
    status: str = "",
    diagnostics: Mapping[str, Any] = MappingProxyType({}),
) -> Reconstruction:
    """One reconstruction of the answers to several observations, each of one update."""
    owners = (part.subject or "unknown" for part, a in zip(parts, answers, strict=True) for _ in range(_count(a)))
    inputs = [answer.inputs for answer in answers if answer.inputs is not None]
    labels = [answer.labels for answer in answers if answer.labels is not None]
    return Reconstruction(
        inputs=join_batches(inputs) if inputs else None,
        labels=_stacked(labels) if len(labels) == len(answers) else None,
        properties=_stacked([answer.properties for answer in answers]),
        owners=tuple(owners),
        ambiguity=frozenset[Ambiguity]({"order"}).union(*(answer.ambiguity for answer in answers)),
        status="; ".join(filter(None, dict.fromkeys([status, *(answer.status for answer in answers)]))),
        diagnostics={**diagnostics, "parts": [answer.diagnostics for answer in answers]},
        per_update=tuple(
            pair for part, answer in zip(parts, answers, strict=True) for pair in answer.per_update or ((part, answer),)
        ),
    )


def _count(reconstruction: Reconstruction) -> int:
    """How many answers a reconstruction gives: one per input, or one per property."""
    if reconstruction.inputs is not None:
        return len(first_tensor(reconstruction.inputs))
    return len(reconstruction.properties) if reconstruction.properties is not None else 0


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def split_updates(observation: Observation) -> tuple[Observation, ...]:
    """One observation per update, each with what is known about that update; `joined` puts them together again."""
    knowledge = observation.knowledge
    if any(round.clients != 1 for round in observation.rounds) and isinstance(knowledge.labels, tuple):
        # Aggregates come with one entry per client, and whose labels belong to which round is not known.
        knowledge = dataclasses.replace(knowledge, labels=None)
    return tuple(
        dataclasses.replace(
            observation,
            rounds=(round,),
            subject=round.participants[0] if round.participants and round.clients == 1 else None,
            knowledge=dataclasses.replace(
                knowledge, **{name: _entry(getattr(knowledge, name), number) for name in PER_UPDATE}
            ),
        )
        for number, round in enumerate(observation.rounds)
        if round.clients > 0  # nobody took part: nothing to attack
    )


def joined(parts: Sequence[Observation]) -> Observation:
    """One observation of all the parts' updates, which `split_updates` takes apart again."""
    first = parts[0]
    whole: dict[str, Any] = {}
    for name in PER_UPDATE:
        entries = tuple(getattr(part.knowledge, name) for part in parts)
        whole[name] = None if any(entry is None for entry in entries) else entries
    return dataclasses.replace(
        first,
        rounds=tuple(round for part in parts for round in part.rounds),
        subject=first.subject if len(parts) == 1 else None,
        knowledge=dataclasses.replace(first.knowledge, **whole),
    )


def _entry(value: Any, number: int) -> Any:
    """The number-th entry of a tuple with one entry per round; a value that is shared is returned as it is."""
    return value[number] if isinstance(value, tuple) else value
