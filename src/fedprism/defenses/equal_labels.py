"""Batches of one class: the samples of a batch push the same output, so that their gradients mix.

Eloul et al., "Enhancing Privacy against Inversion Attacks in Federated Learning by using
Mixing Gradients Strategies", 2022 (drawing identical labels).

Differs from the paper in: the classes take turns, so that every class a client holds is trained on, and clients start
at different classes. After each full turn the order changes: a client who takes part in every second round only would
otherwise never come to half of its classes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.checks import whole
from fedprism.defenses.base import Context, Defense
from fedprism.errors import BadInput
from fedprism.randomness import generator
from fedprism.types import Batch, is_soft

MOST_SAMPLES = 2**31 - 1
"""Samples of a batch at most: a bound on input."""


@dataclass(frozen=True)
class EqualLabels(Defense):
    """Each round a client trains on `size` samples of one class, or on all that it has of that class.

    In round r, client number k trains on the (k + r)-th of the classes that it holds, and starts over after the last
    one, in another order. Without a round number the class is drawn at random. A batch of one sample is read off
    exactly, so with `size` a class of fewer samples is refused. All local steps of a round use the one class.
    """

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            whole(self.size, "EqualLabels' size", MOST_SAMPLES)

    def on_draw(self, dataset: Batch, context: Context, rng: torch.Generator) -> Tensor:
        if is_soft(dataset.labels):
            raise BadInput(
                "EqualLabels needs whole labels (batch,), not soft ones. Draw the batch first and mix labels "
                "afterwards, in on_batch."
            )
        labels = dataset.labels.cpu()
        counts = torch.bincount(labels)  # a tenth of the time of torch.unique, in every step of a training
        classes = counts.nonzero().flatten()
        counts = counts[classes]
        if self.size is not None and int(counts.min()) < self.size:
            rarest = int(counts.argmin())
            raise BadInput(
                f"EqualLabels needs {self.size} samples of each class of {context.client or 'the client'}, "
                f"and class {int(classes[rarest])} has {int(counts[rarest])}. Lower the size, give it more "
                "samples of that class, or leave the class out."
            )
        of_class: Tensor = (labels == classes[_turn(context, len(classes), rng)]).nonzero().flatten()
        if self.size is None or self.size == len(of_class):
            return of_class
        return of_class[torch.randperm(len(of_class), generator=rng)[: self.size].sort().values]


def _turn(context: Context, classes: int, rng: torch.Generator) -> int:
    """Which of a client's classes is next. The first time through they come as they are numbered."""
    if context.round is None:
        return int(torch.randint(classes, (), generator=rng))
    place, times = (_number(context.client or "") + context.round) % classes, context.round // classes
    if times == 0:
        return place
    return int(torch.randperm(classes, generator=generator(times, "order of classes", classes))[place])


def _number(client: str) -> int:
    """The number that ends a client's name; for other names one that depends on the name alone."""
    ending = re.search(r"\d+$", client)
    if ending is not None:
        return int(ending[0][-18:])
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:4], "big") if client else 0
