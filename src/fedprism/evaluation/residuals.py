"""How much of what was recorded an answer accounts for, also where that is several updates: no truth is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fedprism.attacks.certificate import unexplained
from fedprism.runner import placed
from fedprism.types import Observation, Reconstruction


def residual(observation: Observation, reconstruction: Reconstruction) -> float | None:
    """How much of the update the reconstruction leaves unexplained: 0 is all explained, 1 none; None where unknowable.

    It needs no truth: the client's forward model is run on the reconstruction and its direction compared with what was
    observed. Of updates that were attacked one by one it is the mean over those of which it is known; one without
    answer counts 1.
    """
    if reconstruction.per_update is None:
        return _residual_of_one(observation, reconstruction)
    if reconstruction.inputs is None:
        return None
    values = [
        _residual_of_one(_with_all_knowledge(part, observation), answer)
        if answer.inputs is not None and len(answer.inputs)
        else 1.0
        for part, answer in reconstruction.per_update
    ]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _with_all_knowledge(part: Observation, observation: Observation) -> Observation:
    """The observation of one update with all that is granted about training, not only what the attack asked for."""
    known = replace(observation.knowledge, batch_size=part.knowledge.batch_size)
    return replace(part, model=observation.model, knowledge=known)


def _residual_of_one(observation: Observation, reconstruction: Reconstruction) -> float | None:
    inputs, labels = reconstruction.inputs, reconstruction.labels
    if len(observation.rounds) != 1 or inputs is None or labels is None:
        return None
    return unexplained(placed(observation, frozenset(observation.granted()), torch.device("cpu")), inputs, labels)
