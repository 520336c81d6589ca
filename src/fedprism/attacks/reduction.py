"""What splits an observation into simpler ones, and how an attack goes on from there."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fedprism.attacks.base import Attack, Method, UpdateAttack
from fedprism.attacks.updates import joined, joined_answers
from fedprism.types import Observation, Reconstruction


class Reduced(NamedTuple):
    parts: tuple[Observation, ...]
    status: str = ""
    """How far the parts can be trusted, and what could not be told apart; empty where there is nothing to say."""
    diagnostics: Mapping[str, Any] = MappingProxyType({})


class Reduction(Method):
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
            return joined_answers(parts, [self.attack.run(part, rng) for part in parts], status, diagnostics)
        answer = self.attack.run(joined(parts), rng)
        return dataclasses.replace(
            answer,
            ambiguity=answer.ambiguity | {"order"},
            status="; ".join(filter(None, [status, answer.status])),
            diagnostics={**diagnostics, "parts": [answer.diagnostics]},
        )
