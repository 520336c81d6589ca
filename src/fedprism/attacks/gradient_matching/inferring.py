"""The labels behind an update, read off its output layer (`solvers.label_counts`).

With softmax cross-entropy the gradient of the output layer's bias is, class by class, the mean prediction minus the
fraction of the class. Few samples among many classes stand out by their signs. In a batch that is large against the
number of classes signs tell little; but the mean prediction of a network that has learned little hardly depends on the
images, so that random ones are enough to estimate it. What is left are the fractions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.gradient_matching.forward import input_box
from fedprism.client.batchnorm import buffers_of
from fedprism.client.observed import adds_gradients, direction
from fedprism.errors import NotApplicable
from fedprism.inputs import is_single
from fedprism.network.network_map import NetworkMap
from fedprism.randomness import generator, seeded_layers
from fedprism.solvers.closed_form.labels import LabelRecovery, label_counts, sole_label
from fedprism.types import Observation, Round, Update

COUNTING_RATIO = 2
"""Classes per sample below which counting finds more labels than signs do."""
MADE_UP_IMAGES = 64
"""Random images over which predictions are averaged."""
IMAGES_TOGETHER = 32
"""Random images per pass; bounds its memory."""
COARSE_SIDE = 4
"""Pixels per side of a random image before it is enlarged, because images are smooth."""


def inferred_labels(observation: Observation, round: Round, batch: int, network: NetworkMap) -> LabelRecovery:
    """As many labels as there are samples; refuses where the update or the loss does not tell them."""
    last = network.output_layer()
    if last is None or last.weight not in round.update:
        raise NotApplicable(
            "inferring labels needs a dense output layer in the update, but there is none; "
            'set labels="joint" or grant the labels.'
        )
    known = observation.knowledge.loss
    loss = losses.name_of(known) if known is not None else None
    gradient = direction(round, observation.knowledge)
    # Row sums of the weight gradient carry the same signs where the features are not negative.
    has_bias = last.bias is not None and last.bias in round.update
    class_grad = gradient[last.bias or ""] if has_bias else last.rows(gradient).sum(1)
    if round.kind == "delta" and int((class_grad < 0).sum()) > batch >= int((class_grad > 0).sum()) > 0:
        class_grad = -class_grad  # no batch makes so many classes negative: the parameters after were subtracted
    if adds_gradients(round, observation.knowledge) is False and int((class_grad < 0).sum()) != batch:
        raise NotApplicable(
            "inferring labels of clients that train with Adam needs a class of its own per sample, but some classes "
            'occur several times; set labels="joint" or grant the labels.'
        )
    predicted, crowded = None, len(class_grad) < COUNTING_RATIO * batch
    if crowded and has_bias and sole_label(last.rows(gradient)) is None:
        predicted = _mean_prediction(observation, round)
    recovery = label_counts(class_grad, batch, probabilities=predicted, loss=loss or "unknown")
    if len(recovery.labels) != batch:
        raise NotApplicable(
            f"inferring labels needs softmax cross-entropy, not {loss or 'a loss of its own'}; "
            'set labels="joint" or grant the labels.'
        )
    return recovery


def _mean_prediction(observation: Observation, round: Round) -> Tensor | None:
    """(classes,) the mean prediction for inputs that show nothing; None where it is not known what inputs are like."""
    known = observation.knowledge
    box = input_box(observation) if known.input_shape is not None and is_single(known.input_shape) else None
    shape = known.sample_shape if box is not None else ()
    if not shape or box is None:
        return None
    rng = generator(0, "made up")
    grey = torch.rand(
        MADE_UP_IMAGES, *((shape[0], COARSE_SIDE, COARSE_SIDE) if len(shape) == 3 else shape), generator=rng
    )
    if len(shape) == 3:
        grey = nn.functional.interpolate(grey, size=shape[1:], mode="bilinear")
    low, high = box
    inputs = low + (high - low) * grey.to(low)
    # How far training moved the predictions is not known where the update may have been multiplied on its way.
    return _prediction(observation, round, round.params, inputs)


def _prediction(observation: Observation, round: Round, params: Update, inputs: Tensor) -> Tensor:
    model = observation.model
    assert model is not None
    outputs = list[Tensor]()
    with torch.no_grad(), seeded_layers(generator(0, "dropout")):
        for chunk in torch.split(inputs, IMAGES_TOGETHER):
            buffers = {name: tensor.clone() for name, tensor in buffers_of(observation, round).items()}
            outputs.append(losses.predictions(functional_call(model, {**params, **buffers}, (chunk,))))
    return torch.cat(outputs).softmax(-1).flatten(0, -2).mean(0)
