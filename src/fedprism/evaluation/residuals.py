"""How much of what was recorded an answer accounts for, update by update: no truth is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedprism.attacks.base import READ_AS_SGD as READ_AS_SGD
from fedprism.attacks.evidence import EXPLAINED_RESIDUAL as EXPLAINED_RESIDUAL
from fedprism.attacks.evidence import Evidence, evidence
from fedprism.runner import placed
from fedprism.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class UpdateResidual:
    """One update of an observation, and what it says about the samples that were read off it."""

    client: str | None
    """Whose update it is, where that is one client and known."""
    round: int
    samples: int
    residual: float | None
    recovered: bool


def residual(observation: Observation, reconstruction: Reconstruction) -> float | None:
    """How much of an update the reconstruction leaves unexplained: 0 is all explained, 1 none; None where unknowable.

    It needs no truth: the client's forward model is run on the reconstruction and its direction compared with what was
    observed. Of updates that were attacked one by one it is that of the update explained best, because one recovered
    client is a leak however many are not; `residuals` gives all of them.
    """
    return least(residuals(observation, reconstruction))


def residuals(observation: Observation, reconstruction: Reconstruction) -> tuple[UpdateResidual, ...]:
    """What each update says about its own answer; nothing where several updates were attacked as one."""
    if reconstruction.per_update is None:
        return (_of_one(observation, reconstruction),) if len(observation.rounds) == 1 else ()
    pairs = ((_with_all_knowledge(part, observation), answer) for part, answer in reconstruction.per_update)
    return tuple(_of_one(part, answer) for part, answer in pairs if len(part.rounds) == 1)


def least(updates: tuple[UpdateResidual, ...]) -> float | None:
    """The residual of the update that is explained best."""
    return min((each.residual for each in updates if each.residual is not None), default=None)


def _with_all_knowledge(part: Observation, observation: Observation) -> Observation:
    """The observation of one update with all that is granted about training, not only what the attack asked for."""
    known = replace(observation.knowledge, batch_size=part.knowledge.batch_size)
    return replace(part, model=observation.model, knowledge=known)


def _of_one(observation: Observation, answer: Reconstruction) -> UpdateResidual:
    round = observation.round
    found = _evidence(observation, answer)
    named = round.participants if round.clients == 1 else None
    return UpdateResidual(
        client=observation.subject or (named[0] if named else None),
        round=round.index,
        samples=found.samples,
        residual=found.residual,
        recovered=found.recovered,
    )


def _evidence(observation: Observation, answer: Reconstruction) -> Evidence:
    if answer.inputs is None:
        return Evidence(0, None, False)
    return evidence(placed(observation, frozenset(observation.granted()), torch.device("cpu")), answer)
