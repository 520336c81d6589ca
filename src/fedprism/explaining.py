"""How much of what was recorded an answer accounts for, also where that is several updates: no truth is needed."""

from __future__ import annotations

import math

import torch

from fedprism.attacks.base import Attack, Then
from fedprism.errors import FedprismError
from fedprism.running import residual
from fedprism.types import Observation, Reconstruction


def unexplained(attack: Attack, observation: Observation, found: Reconstruction) -> float | None:
    """The residual of an attack; of one that met several updates one by one, the mean over those of which it is known.

    An update that was not answered for at all is unexplained.
    """
    if not isinstance(attack, Then) or attack.attack.reads_many:
        return residual(observation, found)
    answers = found.diagnostics.get("parts", ())
    try:
        parts = attack.reduction.reduce(observation)
    except FedprismError:  # with other knowledge than the attack makes use of, it may come to another end
        return None
    if found.inputs is None or len(parts) != len(answers):
        return None
    inputs = torch.split(found.inputs, [answer["answers"] for answer in answers])
    each = []
    for part, own, answer in zip(parts, inputs, answers, strict=True):
        labels = answer["labels"]
        alone = Reconstruction(inputs=own, labels=None if labels is None else labels.cpu())
        each.append(residual(part, alone) if len(own) else 1.0)
    known = [value for value in each if value is not None]
    return math.fsum(known) / len(known) if known else None
