"""What an attack is: read this file before you write one."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from fedprism.attacks.updates import joined_answers, split_updates
from fedprism.client.observed import adds_gradients
from fedprism.errors import NotApplicable
from fedprism.naming import EvaluableRepr
from fedprism.types import Observation, Reconstruction

READ_AS_SGD = "the clients' optimizer is not known: the update was read as a sum of gradients, as SGD sends"
"""Added to the status of attacks that read updates so."""
NO_DENSE_LAYER = "the input feeds no trained dense layer of this model"
NOBODY_TAMPERS = "nobody in this plan tampers"


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What decides, before anything is simulated, whether an attack is worth trying."""

    dense_layer_first: bool
    """Whether the input feeds a dense layer, as closed forms need."""
    dense_layer_tells: bool
    """Whether that layer has a bias: without it closed forms leave labels, or signs, open."""
    looks_up: bool
    """Whether entries of the input are looked up in tables."""
    patches_first: bool
    """Whether the input feeds a layer of patches that a position parameter or an attention layer opens."""
    few_places: bool
    """Whether the input feeds a layer at fewer places than it has units."""
    few_inner_places: bool
    """Whether a layer behind others is fed at fewer places than it has units, enough of them to tell an image."""
    batchnorm_between: bool
    """Whether batch norm stands between an update and what is fed to the model."""
    tampers: bool
    """Whether an attacker changes what clients receive."""
    mixes: bool
    """Whether a client mixes samples."""
    sums_of_rounds: bool
    """Whether there are sums of several rounds of one model, and something that says who took part in them."""


class Method(EvaluableRepr, ABC):
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


class Attack(Method):
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
            return _answer_to_one(self, observation, rng)
        parts = split_updates(observation)
        return joined_answers(parts, _answers(self, parts, rng))

    @abstractmethod
    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        """The answer for the one update of the observation, `observation.round`; what is known is about it alone."""


def _answers(attack: UpdateAttack, parts: Sequence[Observation], rng: torch.Generator) -> list[Reconstruction]:
    """One per update. An update that the attack does not apply to is left without an answer, unless all of them are."""
    answers, refusals = list[Reconstruction](), list[NotApplicable]()
    for part in parts:
        try:
            answers.append(_answer_to_one(attack, part, rng))
        except NotApplicable as refusal:
            refusals.append(refusal)
            answers.append(Reconstruction(status=str(refusal).rstrip(".")))
    if refusals and len(refusals) == len(parts):
        raise refusals[0]
    return answers


def _answer_to_one(attack: UpdateAttack, observation: Observation, rng: torch.Generator) -> Reconstruction:
    """The attack on one update, where it can read such updates. No method of the class: none may override it."""
    summed = adds_gradients(observation.round, observation.knowledge)
    if summed is False and not attack.reads_scaled_updates:
        optimizer = type(observation.knowledge.local_optimizer).__name__
        raise NotApplicable(
            f"{attack.name} needs updates that are sums of gradients, but clients train with {optimizer}, "
            "which scales each entry by itself; use gradient-matching instead."
        )
    answer = attack.attack_update(observation, rng)
    return dataclasses.replace(answer, status=f"{answer.status}; {READ_AS_SGD}") if summed is None else answer
