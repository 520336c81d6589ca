"""Observations of several updates: taken apart by update, put together, and the answers to them joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedprism.inputs import first_tensor
from fedprism.inputs import joined as join_batches
from fedprism.types import Ambiguity, Observation, Reconstruction

PER_UPDATE = ("batch_size", "labels", "batchnorm_exact")
"""Knowledge about one update: a tuple with one entry per round where there are several."""


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


def joined_answers(
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


def _entry(value: Any, number: int) -> Any:
    """The number-th entry of a tuple with one entry per round; a value that is shared is returned as it is."""
    return value[number] if isinstance(value, tuple) else value


def _count(reconstruction: Reconstruction) -> int:
    """How many answers a reconstruction gives: one per input, or one per property."""
    if reconstruction.inputs is not None:
        return len(first_tensor(reconstruction.inputs))
    return len(reconstruction.properties) if reconstruction.properties is not None else 0


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None
