"""What an attack is, and how attacks are combined."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

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

    @abstractmethod
    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction: ...


class Reduction(_Method):
    """Turns one observation into several simpler ones, such as one for each user."""

    @abstractmethod
    def reduce(self, observation: Observation) -> tuple[Observation, ...]: ...


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
        parts = self.reduction.reduce(observation)
        found = [self.attack.run(part, rng) for part in parts]
        inputs = [r.inputs for r in found if r.inputs is not None]
        labels = [r.labels for r in found if r.labels is not None]
        owners = [
            part.subject or "unknown"
            for part, r in zip(parts, found, strict=True)
            if r.inputs is not None
            for _ in range(len(r.inputs))
        ]
        union: frozenset[Ambiguity] = frozenset({"order"})
        union = union.union(*(r.ambiguity for r in found))
        return Reconstruction(
            inputs=torch.cat(inputs) if inputs else None,
            labels=torch.cat(labels) if len(labels) == len(found) else None,
            owners=tuple(owners),
            ambiguity=union,
            status="; ".join(dict.fromkeys(r.status for r in found)),
            diagnostics={"parts": [dict(r.diagnostics) for r in found]},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class PerClient(Reduction):
    """Splits an observation that holds several clients' updates into one observation an update."""

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "labels"})

    def reduce(self, observation: Observation) -> tuple[Observation, ...]:
        return tuple(
            dataclasses.replace(
                observation,
                rounds=(part,),
                subject=part.participants[0] if part.participants else None,
                knowledge=dataclasses.replace(
                    observation.knowledge,
                    batch_size=_entry(observation.knowledge.batch_size, number),
                    labels=_entry(observation.knowledge.labels, number),
                ),
            )
            for number, part in enumerate(observation.rounds)
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
