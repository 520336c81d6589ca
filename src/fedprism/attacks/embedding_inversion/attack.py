"""Reads tokens and categories off the gradients of the tables that they are looked up in, in closed form.

Melis et al., "Exploiting Unintended Feature Leakage in Collaborative Learning", 2019 (nonzero rows are the words).

Differs from the paper in: the order of a text, how often each sample used a word, and whole rows of tables come with it
wherever the rest of the update tells them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels
from fedprism.attacks.embedding_inversion.answer import Answer, LookupStatus
from fedprism.attacks.embedding_inversion.tables import read_table
from fedprism.attacks.embedding_inversion.texts import read_text
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.inputs import Inputs, blank_inputs, unflattened
from fedprism.network.lookups import lookups_of
from fedprism.types import Observation, Reconstruction

NO_TABLES = "no entry of the input is looked up in a table of this model"


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingInversion(UpdateAttack):
    """Closed-form reading of the tables (embeddings) that the input's tokens or categories are looked up in."""

    citation: ClassVar[str] = "Melis et al. 2019 (words from the rows of an embedding's gradient)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"loss", "batch_size", "labels"}) | FORWARD_USES

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.looks_up else NO_TABLES

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        lookups, network = lookups_of(observation)
        gradient = direction(observation.round)
        lookups = tuple(lookup for lookup in lookups if lookup.operation.weight in gradient)
        if not lookups:
            raise NotApplicable(
                f"embedding-inversion expects a table in the update that entries of the input are looked up in, "
                f"found that {NO_TABLES}; use gradient-matching instead."
            )
        size = observation.knowledge.batch_size
        samples = size if isinstance(size, int) else None
        several = [lookup for lookup in lookups if len(lookup.entries) > 1]
        if several:
            answers = [read_text(observation, gradient, network, max(several, key=lambda l: len(l.entries)), samples)]
        else:
            answers = read_table(observation, gradient, network, lookups, samples)
        return _checked(observation, answers)


def embedding_inversion() -> EmbeddingInversion:
    """Tokens and categories from the tables that they are looked up in."""
    return EmbeddingInversion()


class _Checked(NamedTuple):
    answer: Answer
    inputs: Inputs
    labels: Tensor | None
    explains: bool | None


def _checked(observation: Observation, answers: list[Answer]) -> Reconstruction:
    """The first answer that the whole update confirms, or else the first."""
    checked = []
    for answer in answers:
        checked.append(_check(observation, answer))
        if checked[-1].explains:
            break
    best = checked[-1] if checked[-1].explains else checked[0]
    status = best.answer.status
    if best.explains:
        status = f"{LookupStatus.EXACT}; {status}" if best.answer.ambiguity - {"order"} else LookupStatus.EXACT
    return Reconstruction(
        inputs=best.inputs,
        labels=best.labels,
        ambiguity=best.answer.ambiguity,
        status=status,
        diagnostics={"tables": best.answer.tables, "readings": len(answers)},
    )


def _check(observation: Observation, answer: Answer) -> _Checked:
    knowledge = observation.knowledge
    assert knowledge.input_shape is not None
    inputs = unflattened(answer.samples, blank_inputs(knowledge.input_shape, knowledge.input_types, len(answer.samples)))
    labels = knowledge.labels if isinstance(knowledge.labels, Tensor) else None
    if "samples" in answer.ambiguity or bool((answer.samples < 0).any() and answer.incomplete):
        return _Checked(answer, inputs, labels, None)
    if labels is None or len(labels) != len(answer.samples):
        labels = explaining_labels(observation, inputs)
    return _Checked(answer, inputs, labels, certified(observation, inputs, labels))
