"""Labels counted from the update of many local steps, for attacks that need them.

With softmax cross-entropy the gradient of the output layer's bias is, class by class, the mean prediction less the
share of the class. In a batch of several times as many images as classes hardly a class is missing, so that signs tell
nothing; but the mean prediction of a network that has learned little hangs little on the images, and made-up ones are
enough to estimate it. What is left are the shares.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.attacks.base import Attack, only_round
from fedprism.attacks.forward import input_box
from fedprism.attacks.structure import trace
from fedprism.batchnorm import buffers_of
from fedprism.errors import MissingKnowledge, NotApplicable
from fedprism.randomness import generator
from fedprism.solvers.labels import label_counts
from fedprism.types import Observation, Reconstruction, Round

MADE_UP = 256
"""Images over which predictions are averaged."""
COARSE = 4
"""Their side before they are enlarged: images are smooth."""
NEEDS = frozenset({"model", "input_shape", "batch_size", "bounds", "local_lr", "local_epochs", "local_batch_size"})


@dataclass(frozen=True, kw_only=True, repr=False)
class CountedLabels(Attack):
    """Counts the labels behind an update of plain local SGD, and hands them to `inner` as if they were known."""

    inner: Attack

    citation: ClassVar[str] = "Geiping et al. 2020 (the inner attack; its labels are given)"

    @property
    def needs(self) -> frozenset[str]:
        return (self.inner.needs - {"labels"}) | NEEDS

    @property
    def uses(self) -> frozenset[str]:
        return self.inner.uses | {"local_momentum", "normalization"}

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        seen = only_round(self, observation.rounds)
        labels = counted(observation, seen)
        told = dataclasses.replace(observation.knowledge, labels=labels)
        found = self.inner.run(dataclasses.replace(observation, knowledge=told), rng)
        return dataclasses.replace(found, status=f"labels counted from the update and taken as known; {found.status}")


def counted(observation: Observation, seen: Round) -> Tensor:
    """(samples,) class numbers in ascending order."""
    knowledge, last = observation.knowledge, trace(observation).output_layer()
    samples = knowledge.batch_size
    if seen.kind != "delta" or knowledge.local_momentum or not isinstance(samples, int):
        raise NotApplicable("counting labels expects an update of local SGD without momentum; infer them instead.")
    if last is None or last.bias is None or last.bias not in seen.update:
        raise NotApplicable("counting labels expects an output layer with a bias in the update; grant the labels.")
    if knowledge.local_lr is None or knowledge.local_batch_size is None:
        raise MissingKnowledge("counting labels", "local_lr" if knowledge.local_lr is None else "local_batch_size")
    steps = (knowledge.local_epochs or 1) * math.ceil(samples / seen.clients / knowledge.local_batch_size)
    share = 1.0 / seen.clients if seen.reduction == "sum" else 1.0
    gradient = seen.update[last.bias] * (-share / (steps * knowledge.local_lr))
    moved = {name: p + share * seen.update[name] if name in seen.update else p for name, p in seen.params.items()}
    # What is learned on the way moves the predictions: those before and after are averaged.
    predicted = (_predictions(observation, seen, dict(seen.params)) + _predictions(observation, seen, moved)) / 2
    return label_counts(gradient, samples, probabilities=predicted).labels.to(gradient.device)


def _predictions(observation: Observation, seen: Round, params: dict[str, Tensor]) -> Tensor:
    """(classes,) the mean prediction for smooth images that show nothing."""
    model, shape, box = observation.model, observation.knowledge.input_shape, input_box(observation)
    assert model is not None
    assert shape is not None
    assert box is not None
    coarse = torch.rand(MADE_UP, shape[0], COARSE, COARSE, generator=generator(0, "made up"))
    smooth = nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear").to(next(iter(params.values())))
    low, high = box
    buffers = {name: tensor.clone() for name, tensor in buffers_of(observation, seen).items()}
    with torch.no_grad():
        outputs: Tensor = functional_call(model, {**params, **buffers}, (low + (high - low) * smooth,))
    return outputs.softmax(1).mean(0)
