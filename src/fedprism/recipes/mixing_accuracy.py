"""What losses and labels cost: the accuracy of networks that are trained with them, for the mixing-gradients study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

import fedprism as fp
from fedprism import utility
from fedprism.defenses import Defense, EqualLabels, MseLoss
from fedprism.randomness import generator
from fedprism.recipes.base import Announce, Entry, Settings
from fedprism.recipes.mixing_direct import EQUAL, RANDOM
from fedprism.recipes.mixing_trials import DIGITS, FACES, KINDS, images, loss_name, network
from fedprism.recipes.shelf import Shelf

TRAINED_WIDTH = 12
RATES = {"cross_entropy": (0.005, 0.02, 0.08), "softmax_mse": (0.05, 0.2, 0.8), "mse": (0.001, 0.005, 0.05)}
"""Squared errors are means over classes, and those of a softmax are small: each loss gets the rate that suits it."""
TRAINED_ON = 20_000
CLIENTS, CLIENT_BATCH = 10, 8
EPOCHS, QUICK_EPOCHS = 12, 2
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
ACCURACY, MARGIN = "accuracy", "margin"
PRICE = (
    f"accuracy: in percent, of a dense layer that starts from PyTorch's weights and of a LeNet of {TRAINED_WIDTH} "
    f"channels, trained by {CLIENTS} clients with batches of {CLIENT_BATCH} who send one gradient a step, {EPOCHS} "
    f"epochs on {TRAINED_ON:,} images, at the best of three rates; margin: half the width of the 95 % interval over "
    "seeds."
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A network that is trained with a loss on batches of one kind of labels; all but these fields is the same."""

    data: str
    width: int | None
    loss: str
    labels: str

    @property
    def defense(self) -> Defense:
        """The mixing strategy that stands for the loss and the labels."""
        parts: list[Defense] = [EqualLabels(CLIENT_BATCH)] if self.labels == EQUAL else []
        return fp.chain(
            *parts, *([] if self.loss == "cross_entropy" else [MseLoss(softmax=self.loss == "softmax_mse")])
        )

    def network(self, images: fp.data.ImageSet, seed: int) -> nn.Module:
        """PyTorch's weights for the dense layer; a LeNet's sigmoids do not learn from these, but from larger ones."""
        if self.width is None:
            shape = tuple(images.images.shape[1:])
            return fp.models.build("dense", input_shape=shape, classes=images.classes, seed=seed)
        return network(images, self.width, generator(seed, "uniform weights", self.width))


def prices(
    data: str, width: int | None, loss: str, settings: Settings, announce: Announce, shelf: Shelf
) -> dict[str, dict[str, Entry]]:
    """For each kind of labels the accuracy and its margin; nothing for networks that are only attacked."""
    if data == FACES or width not in ((None,) if settings.quick else (None, TRAINED_WIDTH)):
        return {}
    seeds, found = QUICK_SEEDS if settings.quick else SEEDS, dict[str, dict[str, Entry]]()
    for kind in KINDS:
        training, accuracies = Training(data=data, width=width, loss=loss, labels=kind), list[float]()
        for seed in seeds:
            announce(f"accuracy, {width or 'dense'}, {loss_name(loss)}, {kind} labels, {seed + 1} of {len(seeds)}")
            accuracies.append(accuracy(training, seed, settings, shelf))
        found[kind] = price(accuracies)
    return found


def price(accuracies: Sequence[float]) -> dict[str, Entry]:
    interval = utility.t_interval(tuple(accuracies))
    return {
        ACCURACY: 100 * sum(accuracies) / len(accuracies),
        MARGIN: None if interval is None else 50 * (interval.high - interval.low),
    }


def accuracy(training: Training, seed: int, settings: Settings, shelf: Shelf) -> float:
    """On the test images, at the rate that was best on images held back from the training set."""
    rates = RATES[training.loss]
    tried = replace(training, labels=RANDOM)
    held = [trained(tried, rate, 0, settings, shelf, held_back=True) for rate in rates]
    rate = rates[held.index(max(held))]
    return trained(training, rate, seed, settings, shelf, held_back=False)


def trained(training: Training, rate: float, seed: int, settings: Settings, shelf: Shelf, *, held_back: bool) -> float:
    epochs = QUICK_EPOCHS if settings.quick else EPOCHS
    key = {"recipe": "mixing, accuracy", **asdict(training), "rate": rate, "seed": seed, "epochs": epochs}

    def make() -> dict[str, Any]:
        everything, train, test = _images(training.data, settings, held_back=held_back)
        # Clients of random labels together are one client of a larger batch, at a tenth of the time.
        together = CLIENTS if training.labels == RANDOM else 1
        measured = utility.measure(
            lambda number: training.network(everything, number),
            train,
            test,
            training.defense,
            epochs=epochs,
            batch_size=CLIENT_BATCH * together,
            clients=CLIENTS // together,
            lr=rate,
            weight_decay=0.0,
            seeds=(seed,),
            timed_steps=0,
            device=settings.device,
        )
        return {ACCURACY: measured.accuracy}

    return float(shelf.get({**key, "held back": held_back}, make)[ACCURACY])


def _images(data: str, settings: Settings, *, held_back: bool) -> tuple[fp.data.ImageSet, fp.Batch, fp.Batch]:
    """The data set, what is trained on and what is tested on: the test set, or images held back from training."""
    everything = images(data, settings, "train")
    order = torch.randperm(len(everything), generator=generator(settings.seed, "held back"))[:TRAINED_ON]
    kept = len(order) - len(order) // 6
    if held_back or data == DIGITS:  # of the digits there is one set for everything
        return everything, everything.batch(order[:kept]), everything.batch(order[kept:])
    other = images(data, settings, "test")
    return everything, everything.batch(order), other.batch(torch.arange(len(other)))
