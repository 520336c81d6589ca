"""What an update says about the samples that an attack read off it: the one rule of reports and of the watch."""

from __future__ import annotations

from typing import NamedTuple

from fedprism.attacks.base import READ_AS_SGD
from fedprism.attacks.certificate import left_by_noise, unexplained, within
from fedprism.inputs import first_tensor
from fedprism.solvers.closed_form.dense import DenseStatus
from fedprism.solvers.separation.exact_batch import ExactStatus
from fedprism.types import Observation, Reconstruction

EXPLAINED_RESIDUAL = 0.05
"""The part of an update that may be left unexplained by samples that are said to reproduce it."""
CONFIRMING = (DenseStatus.AGREED, ExactStatus.CONFIRMED)
"""Statuses of samples that parts of an update confirm one by one, also where others are missing."""

REFUTING = (DenseStatus.UNDETERMINED, DenseStatus.BLENDED)
"""Statuses of samples that may explain an update and still be mixtures of the private ones."""


class Evidence(NamedTuple):
    samples: int
    """How many were read off the update."""
    residual: float | None
    """The part of the update that they leave unexplained; None where nobody can tell, or noise leaves as little."""
    recovered: bool
    """Whether the update bears them out."""


def evidence(observation: Observation, answer: Reconstruction) -> Evidence:
    """What the one update of an observation says about an answer to it.

    The samples are recovered if they reproduce the update, or if the attack confirmed each of them by parts of the
    update. The latter is for updates that are known to add gradients up: others have such parts without the samples.
    """
    samples = 0 if answer.inputs is None else len(first_tensor(answer.inputs))
    if not samples:
        return Evidence(0, 1.0 if answer.inputs is not None else None, False)
    assert answer.inputs is not None
    residual = None if answer.labels is None else unexplained(observation, answer.inputs, answer.labels)
    noise = left_by_noise(observation, answer.inputs, answer.labels)
    explained = False if residual is None else within(residual, EXPLAINED_RESIDUAL, noise)
    residual = residual if explained is not None else None
    if any(status in answer.status for status in REFUTING):
        return Evidence(samples, residual, False)
    confirmed = answer.status.endswith(CONFIRMING) and READ_AS_SGD not in answer.status
    return Evidence(samples, residual, confirmed or explained is True)
