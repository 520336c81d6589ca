"""Labels for gradient matching: granted, read off the last layer's gradient, or looked for along with the inputs.

REFINED does both: the search starts from what the last layer's gradient says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.gradient_matching.inferring import inferred_labels
from fedprism.client.observed import direction
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.types import Batch, LossFn, Observation, Round, is_soft


class Labels(StrEnum):
    """Where the labels come from."""

    KNOWN = "known"
    INFERRED = "inferred"
    JOINT = "joint"
    REFINED = "refined"

    def __repr__(self) -> str:
        return f"Labels.{self.name}"


class Link(NamedTuple):
    """What the numbers stand for that are looked for in place of labels: during the search, and as an answer."""

    of: Callable[[Tensor], Tensor]
    answer: Callable[[Tensor], Tensor]


CLASSES = Link(lambda logits: torch.softmax(logits, dim=1), lambda logits: logits.argmax(dim=1))
YES_OR_NO = Link(torch.sigmoid, lambda logits: (logits > 0).to(logits))
NUMBERS = Link(lambda values: values, lambda values: values)


SURE = 4.0
"""How far the logit of a label that the last layer tells starts above the others, which start as noise of size 1."""


class GivenLabels(NamedTuple):
    """fixed: one per sample, whole or soft; None where they are looked for.

    outputs: the shape of what the network returns for one sample, in which labels are looked for. likely: what is added
    to the logits that the search starts from.
    """

    fixed: Tensor | None
    outputs: tuple[int, ...]
    note: str
    link: Link = CLASSES
    likely: Tensor | None = None

    def of(self, logits: Tensor | None, which: slice = slice(None)) -> Tensor:
        """The labels of these samples: those that the logits of as many samples stand for, else the fixed ones."""
        if logits is not None:
            return self.link.of(logits)
        assert self.fixed is not None
        return self.fixed[which]

    def example(self, like: Tensor, shape: tuple[int, ...]) -> Batch:
        """A batch of zeros with labels of the right kind: what is measured before anything is run."""
        labels = self.fixed
        if labels is None:
            labels = self.link.of(like.new_zeros(shape[0], *self.outputs))
        return Batch(like.new_zeros(()).expand(shape), labels)

    @property
    def distinct(self) -> bool:
        fixed = self.fixed
        return fixed is not None and fixed.dim() == 1 and len(set(fixed.tolist())) == len(fixed)


def given_labels(source: Labels, observation: Observation, round: Round, batch: int) -> GivenLabels:
    """The labels of one round's batch; where they cannot be inferred, they are looked for along with the inputs."""
    knowledge, device = observation.knowledge, next(iter(round.params.values())).device
    network = network_map(observation)
    outputs = tuple(network.outputs.shape[1:])
    if source is Labels.KNOWN:
        if not isinstance(knowledge.labels, Tensor):
            raise MissingKnowledge("gradient-matching", "labels")
        _check_labels(knowledge.labels, batch, outputs)
        return GivenLabels(knowledge.labels.to(device), outputs, "known")
    if source is Labels.JOINT:
        return GivenLabels(None, outputs, "optimised jointly", _link(knowledge.loss, outputs))
    signs = _signs(observation, round, network) if batch == 1 else None
    if signs is not None:
        return GivenLabels(signs.to(device), outputs, "inferred (by the signs of the outputs' gradients)")
    try:
        recovery = inferred_labels(observation, round, batch, network)
    except NotApplicable as reason:
        note = f"optimised jointly, because {str(reason).split(';')[0]}"
        return GivenLabels(None, outputs, note, _link(knowledge.loss, outputs))
    labels = recovery.labels.to(device)
    if source is Labels.REFINED and labels.dim() == len(outputs) == 1:
        likely = SURE * torch.nn.functional.one_hot(labels, outputs[0])
        note = f"optimised jointly from those inferred ({recovery.status})"
        return GivenLabels(None, outputs, note, _link(knowledge.loss, outputs), likely)
    return GivenLabels(labels, outputs, f"inferred ({recovery.status})")


def _link(loss: str | LossFn | None, outputs: tuple[int, ...]) -> Link:
    """What labels a loss takes that are the same for every class: weights of classes, yes or no, or numbers."""
    name = losses.name_of(loss) if loss is not None else None
    if name == "binary_cross_entropy":
        return YES_OR_NO
    if name in ("l1", "huber") or math.prod(outputs) == 1:
        return NUMBERS
    if len(outputs) == 2:
        raise NotApplicable(
            f"looking for labels along with the inputs needs one label per sample, not outputs of shape {outputs}, "
            "one row per token; grant the labels."
        )
    return CLASSES


def _signs(observation: Observation, round: Round, network: NetworkMap) -> Tensor | None:
    """(1, outputs): a single sample's labels under binary cross-entropy, whose gradient is sigmoid(output) - label."""
    last, loss = network.output_layer(), observation.knowledge.loss
    binary = loss is not None and losses.name_of(loss) == "binary_cross_entropy"
    if not binary or last is None or last.bias is None or last.bias not in round.update:
        return None
    slopes = direction(round, observation.knowledge)[last.bias]
    return (slopes < 0).to(slopes).unsqueeze(0)


def _check_labels(labels: Tensor, batch: int, outputs: tuple[int, ...]) -> None:
    """Labels of classes are checked here, others by the loss, which is tried on them."""
    fits = len(labels) == batch
    if len(outputs) == 1 and labels.dim() == 1 and not labels.is_floating_point():
        fits = fits and bool(labels.max() < max(2, *outputs))
    elif len(outputs) == 1 and is_soft(labels):
        fits = labels.shape == (batch, *outputs)
    if not fits:
        raise BadInput(
            f"labels must be {batch} labels that fit outputs of shape {outputs}, not of shape {tuple(labels.shape)} "
            f"with largest value {labels.max().item():g}; give the labels of this batch."
        )
