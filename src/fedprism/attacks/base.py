"""What an attack is, and how attacks are combined."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.errors import NotApplicable
from fedprism.naming import EvaluableRepr
from fedprism.types import Ambiguity, Observation, Reconstruction, Round


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

    reads_many: ClassVar[bool] = False
    """Whether it answers for several updates at once: `then` hands it all parts together, not one after the other."""

    @abstractmethod
    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction: ...


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
    """The attack that first reduces the observation and then attacks each part."""
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

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        parts, status, diagnostics = self.reduction.explained(observation)
        if self.attack.reads_many and parts:
            found = [self.attack.run(joined(parts), rng)]
            owners = found[0].owners or ()
        else:
            found = [self.attack.run(part, rng) for part in parts]
            owners = tuple(
                part.subject or "unknown" for part, r in zip(parts, found, strict=True) for _ in range(_answers(r))
            )
        union: frozenset[Ambiguity] = frozenset({"order"})
        union = union.union(*(r.ambiguity for r in found))
        labels = [r.labels for r in found if r.labels is not None]
        return Reconstruction(
            inputs=_stacked([r.inputs for r in found]),
            labels=_stacked(labels) if len(labels) == len(found) else None,
            properties=_stacked([r.properties for r in found]),
            owners=owners,
            ambiguity=union,
            status="; ".join(filter(None, dict.fromkeys([status, *(r.status for r in found)]))),
            diagnostics={
                **diagnostics,
                "parts": [{**r.diagnostics, "answers": _answers(r), "labels": r.labels} for r in found],
            },
        )


def _answers(found: Reconstruction) -> int:
    """How many answers a reconstruction gives: one an input, or one a property."""
    answers = found.inputs if found.inputs is not None else found.properties
    return len(answers) if answers is not None else 0


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


@dataclass(frozen=True, kw_only=True, repr=False)
class PerClient(Reduction):
    """Splits an observation that holds several clients' updates into one observation an update."""

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "labels", "batchnorm_exact"})

    def reduce(self, observation: Observation) -> tuple[Observation, ...]:
        knowledge = observation.knowledge
        if any(seen.clients != 1 for seen in observation.rounds) and isinstance(knowledge.labels, tuple):
            # Aggregates come with one entry a client, and whose labels belong to which round is not known.
            knowledge = dataclasses.replace(knowledge, labels=None)
        return tuple(
            dataclasses.replace(
                observation,
                rounds=(part,),
                subject=part.participants[0] if part.participants and part.clients == 1 else None,
                knowledge=dataclasses.replace(
                    knowledge,
                    batch_size=_entry(knowledge.batch_size, number),
                    labels=_entry(knowledge.labels, number),
                    batchnorm_exact=_entry(knowledge.batchnorm_exact, number),
                ),
            )
            for number, part in enumerate(observation.rounds)
            if part.clients > 0  # nobody took part: nothing to attack
        )


def fitted(attack: Attack, observation: Observation) -> Attack:
    """The attack as it fits the observation: one on a single update meets several updates one by one."""
    alone = not (attack.reads_many or isinstance(attack, Reduction | Then))
    return then(PerClient(), attack) if alone and len(observation.rounds) > 1 else attack


def joined(parts: Sequence[Observation]) -> Observation:
    """One observation of all the parts' updates, one by one: what `PerClient` takes apart again."""
    first = parts[0]
    sizes = [part.knowledge.batch_size for part in parts if isinstance(part.knowledge.batch_size, int)]
    labels = [part.knowledge.labels for part in parts if isinstance(part.knowledge.labels, Tensor)]
    return dataclasses.replace(
        first,
        rounds=tuple(seen for part in parts for seen in part.rounds),
        subject=first.subject if len(parts) == 1 else None,
        knowledge=dataclasses.replace(
            first.knowledge,
            batch_size=tuple(sizes) if len(sizes) == len(parts) else None,
            labels=tuple(labels) if len(labels) == len(parts) else None,
        ),
    )


def _entry(value: Any, number: int) -> Any:
    """The number-th entry of a tuple with one entry a round; a value that is shared is returned as it is."""
    return value[number] if isinstance(value, tuple) else value


def only_round(attack: Attack, rounds: Sequence[Round]) -> Round:
    """The single round an attack on one update works on."""
    if len(rounds) != 1:
        raise NotApplicable(
            f"{attack.name} expects an observation of one update, found {len(rounds)}; "
            "use then(PerClient(), attack) to attack each of them."
        )
    return rounds[0]
