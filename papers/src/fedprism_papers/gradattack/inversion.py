"""Inverted batches: the data, the networks that are attacked, what comes back of gradients, and its scores.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import utility
from fedprism.attacks import Adam, Attack, GradientMatching, Labels, Starts, bn_exact
from fedprism.defenses import Defense, MixUp
from fedprism.errors import BadInput
from fedprism.metrics import psnr
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime.cuda_graphs import Engine
from fedprism.threats import ThreatModel
from fedprism.types import Ambiguity
from fedprism_papers.shared import training
from fedprism_papers.shared.base import Announce, Measured, Settings
from fedprism_papers.shared.measuring import LPIPS, PSNR, SHOWN_IMAGES, lpips_distances
from fedprism_papers.shared.victims import CIFAR, IMAGENET

CITATION = "Huang et al., Evaluating Gradient Inversion Attacks and Defenses, NeurIPS 2021"
ITERATIONS, PAPER_ITERATIONS = 2_000, 10_000  # of an attack: ours and the paper's
OF_A_CLASS = 5
"""How many images of each class the paper attacks: the first five."""
TRAIN, TEST = 12_000, 3_000  # images of CIFAR-10: the first ones train, the last ones test
ATTACKED_BATCH = 64
"""Of the training of the network that is attacked."""
QUICK_SIDE, QUICK_CROPS, QUICK_TEST, QUICK_CHANNELS = 16, 96, 160, 32  # pixels, crops per photograph, images, channels

BEST_LPIPS, SPREAD_LPIPS, BEST_PSNR, SPREAD_PSNR = "best LPIPS", "std of LPIPS", "best PSNR", "std of PSNR"
SHOWN = (LPIPS, BEST_LPIPS, SPREAD_LPIPS, PSNR, BEST_PSNR, SPREAD_PSNR)
STRANGERS = "other images"
PULL, QUICK_PULL = 0.001, 0.03
"""The weight of the pull towards exact statistics, for ResNet-18 and for the small network, which has fewer of them:
with these, test images come back best, which are not attacked. The first is the published one."""
RATE, QUICK_RATE = 0.1, 0.2
"""Adam's first learning rate, chosen in the same way; the first is the published one."""
ENGINE = Engine(tf32=True)
"""What PyTorch does with convolutions unless told otherwise, and so did the published code; several times faster."""

NULL = (
    f"{STRANGERS}: images that nobody attacked, assigned in the same way: an attack that is not better has found "
    "nothing."
)
ROUNDING = "On a GPU the attacks' convolutions round to TF32, as PyTorch's do by default."
LPIPS_NOTE = (
    "LPIPS is VGG's on pixels scaled as it asks for, after a one-to-one assignment; the paper's is on normalised "
    "pixels, each answer beside the image that is most like it. Orderings compare, values do not."
)


# --- data and networks -----------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What networks are fed, how they are trained, and the images that are attacked, the first five of each class."""

    name: str
    train: fp.Batch
    test: fp.Batch
    attacked: fp.Batch
    normalization: Normalization
    network: utility.Factory
    epochs: int
    batch_size: int
    attacked_epochs: int
    attacked_rate: float

    def first(self, count: int) -> fp.Batch:
        """The first `count` of the images that are attacked."""
        if count > len(self.attacked):
            raise BadInput(
                f"there are at most {len(self.attacked)} images to attack, not {count}. Ask for fewer or smaller "
                "batches."
            )
        return self.attacked[:count]


def data_of(settings: Settings) -> Data:
    return photos() if settings.quick else cifar10(settings)


def cifar10(settings: Settings) -> Data:
    """CIFAR-10: of all the images in the data folder, the first 12,000 to train on and the last 3,000 to test."""
    parts = [fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("train", "test")]
    batches = [part.batch(torch.arange(len(part))) for part in parts]
    everything = fp.Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "labels")))
    if len(everything) < TRAIN + TEST:
        raise BadInput(
            f"at least {TRAIN + TEST:,} images of CIFAR-10 are needed, but the data folder holds "
            f"{len(everything):,}. Put more of it into the data folder."
        )
    return Data(
        "CIFAR-10",
        *fed(everything[:TRAIN], everything[-TEST:], parts[0].classes, CIFAR),
        CIFAR,
        lambda seed: fp.models.build("resnet18", classes=parts[0].classes, seed=seed),
        epochs=30,
        batch_size=128,
        attacked_epochs=8,  # 1,496 steps; the published checkpoint has 1,531, two epochs of four times as many images
        attacked_rate=0.05,
    )


def photos() -> Data:
    """The quick stand-in: crops of the embedded photographs, which the network is to tell apart by the photograph."""
    images = fp.data.load("photos", size=QUICK_SIDE, crops=QUICK_CROPS)
    mixed = images.batch(torch.randperm(len(images), generator=generator(0, "held out")))
    return Data(
        "photos",
        *fed(mixed[:-QUICK_TEST], mixed[-QUICK_TEST:], images.classes, IMAGENET),
        IMAGENET,
        lambda seed: small_network(images.classes, seed),
        epochs=5,
        batch_size=32,
        attacked_epochs=2,
        attacked_rate=0.01,  # telling eight photographs apart is soon learned, and what is learned leaks little
    )


def fed(
    train: fp.Batch, test: fp.Batch, classes: int, normalization: Normalization
) -> tuple[fp.Batch, fp.Batch, fp.Batch]:
    """Normalised training and test images, and those that are attacked, in the order of the data."""
    train, test = (fp.Batch(to_inputs(b.tensor, normalization), b.labels) for b in (train, test))
    first = [(train.labels == number).nonzero().flatten()[:OF_A_CLASS] for number in range(classes)]
    return train, test, train[torch.cat(first).sort().values]


def small_network(classes: int, seed: int) -> nn.Module:
    """Two convolutions with batch norm and a dense layer."""
    wide = QUICK_CHANNELS
    with seeded_layers(generator(seed, "network")):
        return nn.Sequential(
            *(nn.Conv2d(3, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, wide, 3, stride=2, padding=1), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(wide * (QUICK_SIDE // 2) ** 2, classes)),
        )


def attacked_network(data: Data, settings: Settings, mixing: MixUp | None = None) -> nn.Module:
    """The network early in training, on mixed images where clients mix, on the CPU."""
    schedule = utility.Schedule(
        epochs=data.attacked_epochs, batch_size=ATTACKED_BATCH, lr=data.attacked_rate, augment=training.shifted
    )
    model = data.network(settings.seed)
    return utility.fit(model, data.train, mixing, schedule, seed=settings.seed, device=settings.device).cpu()


# --- attacks ---------------------------------------------------------------------------------------------------------


def exact_statistics(settings: Settings, quick_iterations: int, labels: Labels = Labels.KNOWN) -> GradientMatching:
    """`bn-exact` with all iterations for one start and the published steps of the rate."""
    return replace(
        bn_exact(),
        labels=labels,
        optimizer=Adam(stepwise=True),
        lr=QUICK_RATE if settings.quick else RATE,
        iterations=settings.iterations_or(ITERATIONS, quick_iterations),
        starts=Starts(),
        batchnorm=replace(bn_exact().batchnorm, pull_weight=QUICK_PULL if settings.quick else PULL),
        engine=ENGINE,
    )


class Answers(NamedTuple):
    """What came back of one batch after the other, each with the seconds it took."""

    parts: tuple[fp.Reconstruction, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Who is attacked: a network, what its clients do to their gradients, and how inputs become pixels."""

    model: nn.Module
    normalization: Normalization | None
    bounds: tuple[float, float] = (0.0, 1.0)
    defense: Defense = fp.chain()  # noqa: RUF009 (frozen)

    def scenario(self, client: fp.Batch) -> fp.Scenario:
        return fp.Scenario(
            model=self.model,
            clients=[client],
            defense=self.defense,
            bounds=self.bounds,
            normalization=self.normalization,
        )


def invert(
    method: Attack, target: Target, batches: Sequence[fp.Batch], threat: ThreatModel, settings: Settings, first: int = 0
) -> Answers:
    """What the method makes of the gradient of each batch; the first of them has the seed `first` beyond the run's."""
    parts, seconds = list[fp.Reconstruction](), list[float]()
    for number, client in enumerate(batches, start=settings.seed + first):
        observation, _ = fp.simulate(target.scenario(client), threat, seed=number, device=settings.device)
        start = time.perf_counter()
        parts.append(fp.run(method, observation, seed=number, device=settings.device))
        seconds.append(time.perf_counter() - start)  # the result lies on the CPU: a GPU has been waited for
    return Answers(parts=tuple(parts), seconds=tuple(seconds))


def trained_target(data: Data, settings: Settings, announce: Announce) -> Target:
    """The network that is attacked, trained now."""
    announce(f"{data.name}: training the attacked network")
    return Target(model=attacked_network(data, settings), normalization=data.normalization)


def in_batches(images: fp.Batch, size: int | list[int]) -> list[fp.Batch]:
    return [images[part] for part in torch.split(torch.arange(len(images)), size)]


# --- scores ----------------------------------------------------------------------------------------------------------


def scored(
    answers: Answers,
    images: fp.Batch,
    normalization: Normalization,
    settings: Settings,
    *,
    method: Attack | None = None,
    further: Mapping[str, float] | None = None,
) -> Measured:
    """Average, best and standard deviation over all images; without a `method` no pictures are kept."""
    sizes = [0 if answer.inputs is None else len(answer.inputs) for answer in answers.parts]
    matches = [
        fp.match(answer, _truth(batch, normalization))
        for answer, batch in zip(answers.parts, in_batches(images[: sum(sizes)], sizes), strict=True)
    ]
    ours, theirs = (torch.cat([getattr(match, side) for match in matches]) for side in ("recovered", "truth"))
    decibels, distances = psnr(ours, theirs), lpips_distances(ours, theirs, settings)
    values = {PSNR: decibels.mean(), BEST_PSNR: decibels.max(), SPREAD_PSNR: decibels.std(correction=0)}
    if distances is not None:
        values |= {LPIPS: distances.mean(), BEST_LPIPS: distances.min(), SPREAD_LPIPS: distances.std(correction=0)}
    measured = {name: float(value) for name, value in values.items()}
    return Measured(
        values={name: (value,) for name, value in {**measured, **(further or {})}.items()},
        seconds=answers.seconds,
        statuses=tuple(answer.status for answer in answers.parts),
        settings="" if method is None else repr(method),
        pictures=None if method is None else (theirs[:SHOWN_IMAGES], ours[:SHOWN_IMAGES]),
    )


def _truth(batch: fp.Batch, normalization: Normalization) -> fp.Truth:
    owners = ("client-0",) * len(batch)
    return fp.Truth(inputs=batch.inputs, labels=batch.labels, owners=owners, normalization=normalization)


def scored_strangers(data: Data, images: fp.Batch, size: int, settings: Settings) -> Measured:
    """What test images in any order score beside the attacked ones: chance and the best assignment, no update."""
    chosen = torch.randperm(len(data.test), generator=generator(settings.seed, "strangers", size))[: len(images)]
    return scored(unattacked(data.test.tensor[chosen], size), images, data.normalization, settings)


def effort(data: Data, settings: Settings, iterations: str) -> str:
    """How much was done, as a note."""
    return (
        f"{data.name}: a network trained for {data.attacked_epochs} epochs on {len(data.train):,} images, some of "
        f"which are attacked; {iterations}, batches a row: {settings.batches_or(1)}."
    )


def unattacked(inputs: Tensor, size: int) -> Answers:
    """Inputs as if they were answers, in batches."""
    order: frozenset[Ambiguity] = frozenset({"order"})
    parts = (fp.Reconstruction(inputs=part, ambiguity=order) for part in torch.split(inputs, size))
    return Answers(parts=tuple(parts), seconds=(0.0,))
