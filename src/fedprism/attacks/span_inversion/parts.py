"""One image's part of a batch's gradient: whether it is one, with which label, and the gradient without it."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.gradient_matching.forward import forward_model
from fedprism.attacks.span_inversion.spanned import SpannedLayer
from fedprism.client.observed import is_batch_gradient
from fedprism.network.network_map import network_map
from fedprism.network.splitting import features_before
from fedprism.solvers.matching.spans import summand
from fedprism.types import Observation, Update

SUMMAND_ERROR = 0.01
"""Of a gradient that is a summand of the observed one, up to rounding: float32 leaves 1e-3 of ill-conditioned ones."""
SHORTLIST = 10
"""Labels of an image that are tried: those that the output layer's gradient speaks for most."""


class Part(NamedTuple):
    label: Tensor | None
    """(1,)"""
    gradient: Update
    factor: float
    """How often it is in the observed gradient."""
    error: float
    """How far it is from being a part of it, and with the same factor in all layers."""

    @property
    def confirmed(self) -> bool:
        return self.error <= SUMMAND_ERROR


NO_PART = Part(None, {}, 0.0, math.inf)


def part_of(observation: Observation, layers: list[SpannedLayer], gradient: Update, image: Tensor) -> Part:
    """The gradient of an image (1, *input_shape) with the label for which it is closest to a part of `gradient`."""
    if not is_batch_gradient(observation.round, observation.knowledge):
        return NO_PART
    forward = forward_model(observation, observation.round, unroll=False, adaptive=False)
    best = NO_PART
    for label in _possible_labels(observation, gradient, image):
        sent = forward(image, label, create_graph=False)
        part = _part(layers, gradient, label, dict(zip(forward.names, sent, strict=True)))
        best = part if part.error < best.error else best
    return best


def without(gradient: Update, part: Part) -> dict[str, Tensor]:
    """What is left of a gradient without a part of it."""
    taken = part.gradient
    return {name: tensor - part.factor * taken[name] if name in taken else tensor for name, tensor in gradient.items()}


def _part(layers: list[SpannedLayer], gradient: Update, label: Tensor, own: Update) -> Part:
    factors, errors = [], []
    for layer in layers:
        operation = layer.candidate.operation
        found = summand(operation.rows(gradient), operation.rows(own), layer.span.rank)
        factors.append(found.factor)
        errors.append(found.error)
    factor = statistics.median(factors)
    apart = max(abs(each / factor - 1) for each in factors) if factor else math.inf
    return Part(label, own, factor, max(apart, *errors))


def _possible_labels(observation: Observation, gradient: Update, image: Tensor) -> list[Tensor]:
    """The labels that the image may have, as (1,) each."""
    known, loss, device = observation.knowledge.labels, observation.knowledge.loss, image.device
    if isinstance(known, Tensor):
        return [label[None].to(device) for label in torch.unique(known, dim=0)]
    network = network_map(observation)
    if not losses.is_cross_entropy(loss) or network.outputs.dim() != 2:
        return []
    classes = network.outputs.shape[1]
    last = network.output_layer()
    order = torch.arange(classes)
    if last is not None and last.weight in gradient and last.inputs.dim() == 2:
        with torch.no_grad():
            features = features_before(observation, observation.round, last)(image)
        # The row of an image's own class points against its features, the others along them.
        order = (last.rows(gradient) @ features[0]).argsort().cpu()
    return [order[place : place + 1].to(device) for place in range(min(SHORTLIST, classes))]
