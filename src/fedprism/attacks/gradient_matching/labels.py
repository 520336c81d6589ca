"""Labels for gradient matching: granted, read off the last layer's gradient, or looked for along with the inputs."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.gradient_matching.inferring import inferred_labels
from fedprism.errors import BadInput, MissingKnowledge
from fedprism.network.network_map import network_map
from fedprism.types import Batch, Observation, Round, is_soft


class Labels(StrEnum):
    """Where the labels come from."""

    KNOWN = "known"
    INFERRED = "inferred"
    JOINT = "joint"

    def __repr__(self) -> str:
        return f"Labels.{self.name}"


class GivenLabels(NamedTuple):
    """fixed: one per sample, whole or soft; None where they are looked for."""

    fixed: Tensor | None
    classes: int
    note: str

    def of(self, logits: Tensor | None, which: slice = slice(None)) -> Tensor:
        """The labels of these samples: those that the logits of as many samples stand for, else the fixed ones."""
        if logits is not None:
            return torch.softmax(logits, dim=1)
        assert self.fixed is not None
        return self.fixed[which]

    def example(self, like: Tensor, shape: tuple[int, ...]) -> Batch:
        """A batch of zeros with labels of the right kind: what is measured before anything is run."""
        labels = like.new_full((shape[0], self.classes), 1 / self.classes) if self.fixed is None else self.fixed
        return Batch(like.new_zeros(()).expand(shape), labels)

    @property
    def distinct(self) -> bool:
        fixed = self.fixed
        return fixed is not None and not is_soft(fixed) and len(set(fixed.tolist())) == len(fixed)


def given_labels(source: Labels, observation: Observation, round: Round, batch: int) -> GivenLabels:
    """The labels of one round's batch."""
    knowledge, device = observation.knowledge, next(iter(round.params.values())).device
    network = network_map(observation)
    classes = network.outputs.shape[-1]
    if source is Labels.KNOWN:
        if not isinstance(knowledge.labels, Tensor):
            raise MissingKnowledge("gradient-matching", "labels")
        _check_labels(knowledge.labels, batch, classes)
        return GivenLabels(knowledge.labels.to(device), classes, "known")
    if source is Labels.JOINT:
        return GivenLabels(None, classes, "optimised jointly")
    recovery = inferred_labels(observation, round, batch, network)
    return GivenLabels(recovery.labels.to(device), classes, f"inferred ({recovery.status})")


def _check_labels(labels: Tensor, batch: int, classes: int) -> None:
    fits = labels.shape == (batch, classes) if is_soft(labels) else labels.shape == (batch,) and labels.max() < classes
    if not fits:
        raise BadInput(
            f"expected {batch} labels below the model's {classes} classes, found shape {tuple(labels.shape)} with "
            f"largest value {labels.max().item():g}; give the labels of this batch."
        )
