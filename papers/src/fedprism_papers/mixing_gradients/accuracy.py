"""What losses and labels cost: the accuracy of networks that are trained with them, for the mixing-gradients study."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import utility
from fedprism.defenses import Context, Defense, EqualLabels, MseLoss
from fedprism.experiments import Outcome
from fedprism.randomness import generator
from fedprism_papers.mixing_gradients.direct import EQUAL, RANDOM
from fedprism_papers.mixing_gradients.trials import DIGITS, FACES, KINDS, ORDINARY, images, loss_name, network
from fedprism_papers.shared.base import Announce, Entry, Settings
from fedprism_papers.shared.trials import RecipeTrial, finish

TRAINED_WIDTH = 12  # channels of the LeNet
RATES, QUICK_RATES = tuple(0.005 * 2.0**k for k in range(10)), (0.02, 0.16, 1.28)
"""The same for every loss, and so wide apart that each finds one that suits it: images held back decide."""
SPREAD = 0.03
"""How far the accuracy of a seed may be behind that of the first; those that learn were within 0.01 of each other."""
TRAINED_ON = 60_000  # images: all that MNIST has for training
CLIENTS, CLIENT_BATCH = 10, 8  # clients, and images of each per step
EPOCHS, QUICK_EPOCHS = 15, 2  # of a training
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)  # one training each
ACCURACY, MARGIN = "accuracy", "margin"


@dataclass(frozen=True)
class TenClients(Defense):
    """Batches of equal labels of clients who hold every tenth sample, as one batch: its gradient is their mean."""

    size: int

    def on_draw(self, dataset: fp.Batch, context: Context, rng: torch.Generator) -> Tensor:
        labels, drawn = dataset.labels.cpu(), list[Tensor]()
        for number in range(CLIENTS):
            held = fp.Batch(labels[number::CLIENTS], labels[number::CLIENTS])  # drawing looks at labels alone
            chosen = EqualLabels(self.size).on_draw(held, replace(context, client=f"client-{number}"), rng)
            drawn.append(number + CLIENTS * chosen)
        return torch.cat(drawn)


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
        parts: list[Defense] = [TenClients(CLIENT_BATCH)] if self.labels == EQUAL else []
        return fp.chain(
            *parts, *([] if self.loss == "cross_entropy" else [MseLoss(softmax=self.loss == "softmax_mse")])
        )

    def network(self, images: fp.data.ImageSet, seed: int) -> nn.Module:
        """PyTorch's weights for outputs, from which they start small; the paper's before, from which sigmoids learn."""
        rng = generator(seed, "uniform weights", self.width)
        outputs = network(images, self.width, rng, ORDINARY)
        if self.width is None:
            return outputs
        model = network(images, self.width, rng)
        with torch.no_grad():
            for parameter, ordinary in list(zip(model.parameters(), outputs.parameters(), strict=True))[-2:]:
                parameter.copy_(ordinary)
        return model


def prices(
    data: str, width: int | None, loss: str, settings: Settings, announce: Announce
) -> dict[str, dict[str, Entry]]:
    """For each kind of labels the accuracy and its margin; nothing for networks that are only attacked."""
    if data == FACES or width not in ((None,) if settings.quick else (None, TRAINED_WIDTH)):
        return {}
    seeds, by_kind = QUICK_SEEDS if settings.quick else SEEDS, dict[str, dict[str, Entry]]()
    for kind in KINDS:
        training = Training(data=data, width=width, loss=loss, labels=kind)
        rate = best_rate(training, settings, announce)
        accuracies = [trained(training, rate, seed, settings, announce, held_back=False) for seed in seeds]
        interval = utility.t_interval(tuple(accuracies))
        by_kind[kind] = {
            ACCURACY: 100 * sum(accuracies) / len(accuracies),
            MARGIN: None if interval is None else 50 * (interval.high - interval.low),
        }
    return by_kind


def cost_note(settings: Settings) -> str:
    """How the networks were trained whose accuracy is in the table."""
    rates, epochs = (QUICK_RATES, QUICK_EPOCHS) if settings.quick else (RATES, EPOCHS)
    count = "five sixths of the digits" if settings.quick else f"{TRAINED_ON:,} images"
    return (
        "accuracy: in percent, of a dense layer that starts from PyTorch's weights"
        f"{'' if settings.quick else f' and of a LeNet of {TRAINED_WIDTH} channels'}, trained by {CLIENTS} clients "
        f"with batches of {CLIENT_BATCH} who send one gradient per step, {epochs} epochs on {count}, at the one of "
        f"{len(rates)} rates that did best on images held back; margin: half the width of the 95 % interval over seeds."
    )


def best_rate(training: Training, settings: Settings, announce: Announce) -> float:
    """On images held back: the best rate of the first seed with which all seeds learn, or else its best."""
    rates, seeds = (QUICK_RATES, QUICK_SEEDS) if settings.quick else (RATES, SEEDS)
    tried = replace(training, labels=RANDOM)

    def held(rate: float, seed: int) -> float:
        return trained(tried, rate, seed, settings, announce, held_back=True)

    first = sorted(rates, key=lambda rate: held(rate, seeds[0]), reverse=True)
    for rate in first:
        if all(held(rate, seed) > held(rate, seeds[0]) - SPREAD for seed in seeds):
            return rate
    return first[0]


def trained(
    training: Training, rate: float, seed: int, settings: Settings, announce: Announce, *, held_back: bool
) -> float:
    epochs = QUICK_EPOCHS if settings.quick else EPOCHS
    trial = TrainingRun(training=training, rate=rate, seed=seed, epochs=epochs, held_back=held_back, settings=settings)
    return float(finish(trial, announce).outcome.values[ACCURACY])


@dataclass(frozen=True, kw_only=True)
class TrainingRun(RecipeTrial):
    """One training at one rate, and its accuracy on images held back from the training set or on the test set."""

    training: Training
    rate: float
    seed: int
    epochs: int
    held_back: bool

    @property
    def title(self) -> str:
        training = self.training
        what = f"{training.width or 'dense'}, {loss_name(training.loss)}, {training.labels} labels"
        return f"accuracy, {what}, rate {self.rate:g}, seed {self.seed}"

    def run(self, device: str | None) -> Outcome:
        everything, train, test = _images(self.training.data, self.settings, held_back=self.held_back)
        measured = utility.measure(
            lambda number: self.training.network(everything, number),
            train,
            test,
            self.training.defense,
            epochs=self.epochs,
            batch_size=CLIENTS * CLIENT_BATCH,
            lr=self.rate,
            weight_decay=0.0,
            seeds=(self.seed,),
            timed_steps=0,
            device=device,
        )
        return self.done({ACCURACY: measured.accuracy}, {})


def _images(data: str, settings: Settings, *, held_back: bool) -> tuple[fp.data.ImageSet, fp.Batch, fp.Batch]:
    """The data set, what is trained on and what is tested on: the test set, or images held back from training."""
    everything = images(data, settings, "train")
    order = torch.randperm(len(everything), generator=generator(settings.seed, "held back"))[:TRAINED_ON]
    kept = order[: len(order) - len(order) // 6]
    if held_back or data == DIGITS:  # of the digits there is one set for everything
        return everything, _by_class(everything, kept), everything.batch(order[len(kept) :])
    other = images(data, settings, "test")
    return everything, _by_class(everything, order), other.batch(torch.arange(len(other)))


def _by_class(everything: fp.data.ImageSet, chosen: Tensor) -> fp.Batch:
    """So that every tenth sample is a tenth of each class: these are what `TenClients` hold."""
    return everything.batch(chosen[everything.labels[chosen].argsort(stable=True)])
