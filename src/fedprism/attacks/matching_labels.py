"""Labels for gradient matching: granted, read off the last layer's gradient, or looked for along with the inputs."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from fedprism.attacks.inferring import inferred_labels
from fedprism.attacks.structure import trace
from fedprism.errors import BadInput, MissingKnowledge
from fedprism.types import Observation, Round, is_soft


class Labels(StrEnum):
    """Where the labels come from."""

    KNOWN = "known"
    INFERRED = "inferred"
    JOINT = "joint"

    def __repr__(self) -> str:
        return f"Labels.{self.name}"


class GivenLabels(NamedTuple):
    """fixed: one a sample, whole or soft; None where they are looked for."""

    fixed: Tensor | None
    classes: int
    note: str

    @property
    def distinct(self) -> bool:
        fixed = self.fixed
        return fixed is not None and not is_soft(fixed) and len(set(fixed.tolist())) == len(fixed)


def given_labels(source: Labels, observation: Observation, seen: Round, batch: int) -> GivenLabels:
    """The labels to go by for one round."""
    knowledge, device = observation.knowledge, next(iter(seen.params.values())).device
    network = trace(observation)
    classes = network.outputs.shape[-1]
    if source is Labels.KNOWN:
        if not isinstance(knowledge.labels, Tensor):
            raise MissingKnowledge("gradient-matching", "labels")
        _check_labels(knowledge.labels, batch, classes)
        return GivenLabels(knowledge.labels.to(device), classes, "known")
    if source is Labels.JOINT:
        return GivenLabels(None, classes, "optimised jointly")
    recovery = inferred_labels(observation, seen, batch, network)
    return GivenLabels(recovery.labels.to(device), classes, f"inferred ({recovery.status})")


def _check_labels(labels: Tensor, batch: int, classes: int) -> None:
    fits = labels.shape == (batch, classes) if is_soft(labels) else labels.shape == (batch,) and labels.max() < classes
    if not fits:
        raise BadInput(
            f"expected {batch} labels below the model's {classes} classes, found shape {tuple(labels.shape)} with "
            f"largest value {labels.max().item():g}; give the labels of this batch."
        )
