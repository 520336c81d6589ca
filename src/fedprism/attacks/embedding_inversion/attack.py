"""Reads tokens and categories off the gradients of the tables that they are looked up in, in closed form.

Melis et al., "Exploiting Unintended Feature Leakage in Collaborative Learning", 2019 (nonzero rows are the words).

Differs from the paper in: the order of a text, how often each sample used a word, and whole rows of tables come with it
wherever the rest of the update tells them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels
from fedprism.attacks.embedding_inversion.answer import UNKNOWN, Answer, LookupStatus, rows_in_use
from fedprism.attacks.embedding_inversion.tables import columns_alone, read_table
from fedprism.attacks.embedding_inversion.texts import read_text
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.client.observed import adds_gradients, direction
from fedprism.errors import NotApplicable
from fedprism.network.lookups import coded_pass
from fedprism.types import Observation, Reconstruction

RUNNING_STATISTICS = (
    "the numbers beside it are by the running batch-norm statistics, which a client in train mode does not use"
)
CONTRADICTED = "the update recomputed from these samples is another one"
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
        return frozenset({"loss", "batch_size", "labels", "bounds", "normalization"}) | FORWARD_USES

    @property
    def reads_any_inputs(self) -> bool:
        return True

    @property
    def reads_scaled_updates(self) -> bool:
        return True

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.looks_up else NO_TABLES

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        coded = coded_pass(observation)
        gradient = direction(observation.round, observation.knowledge)
        lookups = tuple(lookup for lookup in coded.lookups if lookup.operation.weight in gradient)
        if not lookups:
            raise NotApplicable(
                "embedding-inversion needs a table in the update that entries of the input are looked up in, but there "
                "is none; use gradient-matching for floating-point inputs."
            )
        size = observation.knowledge.batch_size
        samples = size if isinstance(size, int) else None
        used = [rows_in_use(observation, gradient, lookup, samples) for lookup in lookups]
        # Entries that an optimizer scaled tell which rows were used and which are equal, but not the sums of rows.
        summed = adds_gradients(observation.round, observation.knowledge) is not False
        answers = read_table(observation, gradient, coded, lookups, used) if summed else []
        if not answers:
            longest = max(range(len(lookups)), key=lambda number: len(lookups[number].entries))
            if len(lookups[longest].entries) > 1:
                answers = read_text(observation, gradient, coded, lookups[longest], used[longest], summed=summed)
            else:
                answers = [columns_alone(observation, coded, lookups, used)]
        return _checked(observation, answers)


def embedding_inversion() -> EmbeddingInversion:
    """Tokens and categories from the tables that they are looked up in."""
    return EmbeddingInversion()


def _checked(observation: Observation, answers: list[Answer]) -> Reconstruction:
    """The first answer that explains the whole update, or else the first."""
    best, labels, explains = None, None, None
    for answer in answers:
        guessed, explained = _held_against_update(observation, answer)
        if best is None or explained:
            best, labels, explains = answer, guessed, explained
        if explained:
            break
    assert best is not None
    return Reconstruction(
        inputs=observation.knowledge.shaped(best.samples),
        labels=labels,
        ambiguity=best.ambiguity,
        status=_status(best, explains),
        diagnostics={"tables": best.tables, "readings": len(answers)},
    )


def _held_against_update(observation: Observation, answer: Answer) -> tuple[Tensor | None, bool | None]:
    """Labels that fit, and whether the samples explain the whole update; None where that cannot be told."""
    known = observation.knowledge.labels
    labels = known if isinstance(known, Tensor) else None
    if "samples" in answer.ambiguity or bool((answer.samples == UNKNOWN).any()):
        return labels, None
    inputs = observation.knowledge.shaped(answer.samples)
    fitting = labels is not None and len(labels) == len(answer.samples)
    guessed = labels if fitting else explaining_labels(observation, inputs)
    explains = certified(observation, inputs, guessed)
    return guessed if explains else labels, explains


def _status(answer: Answer, explains: bool | None) -> str:
    """What was read, and what the whole update says about it."""
    if explains and not answer.by_running_statistics:
        return f"{LookupStatus.EXACT}; {answer.status}" if answer.ambiguity - {"order"} else LookupStatus.EXACT
    status = answer.status
    if answer.by_running_statistics:
        status = f"{status}; {RUNNING_STATISTICS}"
    if explains is False and not answer.ambiguity & {"counts", "samples"}:
        status = f"{status}; {CONTRADICTED}"
    return status
