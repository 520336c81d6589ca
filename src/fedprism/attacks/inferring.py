"""The labels behind an update, read off its output layer (`solvers.label_counts`).

With softmax cross-entropy the gradient of the output layer's bias is, class by class, the mean prediction less the
share of the class. Few samples among many classes stand out by their signs. In a batch that is large against the number
of classes hardly a class is missing, and signs tell little; but the mean prediction of a network that has learned
little hangs little on the images, and made-up ones are enough to estimate it. What is left are the shares.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.forward import input_box
from fedprism.attacks.structure import Trace
from fedprism.batchnorm import buffers_of
from fedprism.errors import NotApplicable
from fedprism.randomness import generator, seeded_layers
from fedprism.solvers.labels import LabelRecovery, label_counts, sole_label
from fedprism.types import Knowledge, Observation, Round, Update

COUNTING_RATIO = 2
"""With fewer classes than this many times the batch, counting finds more labels than signs do."""
MADE_UP, TOGETHER = 64, 32
"""Images over which predictions are averaged, and how many of them are held at a time."""
COARSE = 4
"""Their side before they are enlarged: images are smooth."""


def inferred_labels(observation: Observation, seen: Round, batch: int, network: Trace) -> LabelRecovery:
    """As many labels as there are samples; refuses where the update or the loss does not tell them."""
    last = network.output_layer()
    if last is None or last.weight not in seen.update:
        raise NotApplicable(
            "inferring labels expects a dense output layer in the update, found none; "
            'set labels="joint" or grant the labels.'
        )
    known = observation.knowledge.loss
    loss = losses.name_of(known) if known is not None else None
    sign = -1.0 if seen.kind == "delta" else 1.0
    # Row sums of the weight gradient carry the same signs where the features are not negative.
    has_bias = last.bias is not None and last.bias in seen.update
    class_grad = sign * (seen.update[last.bias or ""] if has_bias else seen.update[last.weight].sum(1))
    predicted, scale = None, _gradient_scale(observation.knowledge, seen, batch)
    crowded = len(class_grad) < COUNTING_RATIO * batch
    if crowded and has_bias and scale is not None and sole_label(sign * seen.update[last.weight]) is None:
        class_grad, predicted = class_grad * scale, _mean_prediction(observation, seen)
    recovery = label_counts(class_grad, batch, probabilities=predicted, loss=loss or "unknown")
    if len(recovery.labels) != batch:
        raise NotApplicable(
            f"inferring labels expects softmax cross-entropy, found {loss or 'a loss of its own'}; "
            'set labels="joint" or grant the labels.'
        )
    return recovery


def _gradient_scale(knowledge: Knowledge, seen: Round, batch: int) -> float | None:
    """What the update is multiplied by to have the size of the mean gradient of all steps; None where it is unknown."""
    if not seen.clients:
        return None
    if seen.kind == "gradient":
        return seen.share
    if knowledge.local_lr is None or knowledge.local_batch_size is None or knowledge.local_momentum:
        return None
    steps = (knowledge.local_epochs or 1) * math.ceil(batch / seen.clients / knowledge.local_batch_size)
    return seen.share / (steps * knowledge.local_lr)


def _mean_prediction(observation: Observation, seen: Round) -> Tensor | None:
    """(classes,) the mean prediction for inputs that show nothing; None where it is not known what inputs are like."""
    shape, box = observation.knowledge.input_shape, input_box(observation)
    if shape is None or box is None:
        return None
    rng = generator(0, "made up")
    grey = torch.rand(MADE_UP, *((shape[0], COARSE, COARSE) if len(shape) == 3 else shape), generator=rng)
    if len(shape) == 3:
        grey = nn.functional.interpolate(grey, size=shape[1:], mode="bilinear")
    low, high = box
    inputs = low + (high - low) * grey.to(low)
    before = dict(seen.params)
    if seen.kind == "gradient":
        return _prediction(observation, seen, before, inputs)
    # What is learned on the way moves the predictions: those before and after are averaged.
    after = {name: p + seen.share * seen.update[name] if name in seen.update else p for name, p in before.items()}
    return (_prediction(observation, seen, before, inputs) + _prediction(observation, seen, after, inputs)) / 2


def _prediction(observation: Observation, seen: Round, params: Update, inputs: Tensor) -> Tensor:
    model = observation.model
    assert model is not None
    outputs = list[Tensor]()
    with torch.no_grad(), seeded_layers(generator(0, "dropout")):
        for some in torch.split(inputs, TOGETHER):
            buffers = {name: tensor.clone() for name, tensor in buffers_of(observation, seen).items()}
            outputs.append(functional_call(model, {**params, **buffers}, (some,)))
    return torch.cat(outputs).softmax(-1).flatten(0, -2).mean(0)
