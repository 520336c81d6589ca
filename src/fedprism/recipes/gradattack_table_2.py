"""Table 2: what pruning and mixing cost in accuracy and in time, and what they leave of an attack.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.

The attacker is the paper's strongest: it is given the labels and the batch-norm statistics of every batch. The naive
one does not know the defense. The adaptive one compares the entries that pruning kept alone and, of mixed images, looks
for the encodings of several epochs and solves for the images, told which images were mixed and with what weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import devices, utility
from fedprism.attacks import GradientMatching, Labels, bn_exact
from fedprism.defenses import Context, Defense, InstaHide, MixUp, Prune
from fedprism.defenses.mixup import Mixing
from fedprism.errors import BadInput
from fedprism.metrics import LpipsUnavailable, lpips, psnr
from fedprism.pixels import Normalization
from fedprism.randomness import generator, seeded_layers
from fedprism.recipes import training
from fedprism.recipes.base import Announce, Entry, Outcome, Recipe, Row, Settings
from fedprism.recipes.measuring import LPIPS, PSNR, SHOWN_IMAGES
from fedprism.recipes.sheets import contact_sheet
from fedprism.recipes.victims import CIFAR, IMAGENET
from fedprism.solvers import TotalVariation, decode_mixtures, total_variation
from fedprism.solvers.matching import Prior
from fedprism.types import Ambiguity

SIZES, QUICK_SIZES = (1, 16, 32), (2,)
IMAGES, OF_A_CLASS = 50, 5
"""How many images the paper attacks: the first five of each class."""
ITERATIONS, QUICK_ITERATIONS = 10_000, 60
ENCODED, QUICK_ENCODED = 4, 2
"""For how many epochs the attacker collects encodings; the paper: 20."""
RIDGE = 1e-3
"""Against the noise on recovered encodings, when they are decoded."""
TRAIN, TEST = 12_000, 3_000
ATTACKED_EPOCHS, ATTACKED_BATCH = 2, 64
"""The attacked network is trained this far: the published checkpoint is that of the second epoch."""
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
QUICK_SIDE, QUICK_CROPS, QUICK_TEST = 16, 96, 160

NAIVE, ADAPTIVE, STRANGERS = "naive", "adaptive", "other images"
ACCURACY, DROP, MARGIN, TIME = "accuracy, %", "drop", "±", "time factor"
BEST_LPIPS, SPREAD_LPIPS, BEST_PSNR, SPREAD_PSNR = "best LPIPS", "std of LPIPS", "best PSNR", "std of PSNR"

READING = (
    f"{ACCURACY}: mean over the seeds, and {MARGIN} its 95 % interval (Student's t). The paper trains on 49,000 images "
    "for up to 200 epochs, so accuracies do not compare; drops from the undefended network do."
)
TIMING = f"{TIME}: time of a training step over that of one without defense, medians over steps that take turns."
ATTACKERS = (
    f"The attacker is given labels and exact batch-norm statistics. {NAIVE}: it does not know the defense and takes "
    f"what it finds for the image. {ADAPTIVE}: it compares the entries that pruning kept alone; of mixed images it "
    "decodes the encodings of all epochs, told who was mixed with what weights. The paper's attacker decodes, and does "
    "not mask."
)
NULL = (
    f"{STRANGERS}: images that nobody attacked, assigned in the same way: an attack that is not better has found "
    "nothing."
)
DIFFERENCES = (
    "Images are mixed with those that are attacked in the same cell (the paper: with all 50). LPIPS is VGG's on pixels "
    "scaled as it asks for, after a one-to-one assignment; the paper's is on normalised pixels, each answer beside the "
    "image that is most like it. Orderings compare, values do not."
)
COST = (
    f"Without being told the mixing, 5,000 images cost {utility.attack_cost(5_000).total:.2f} GPU hours by the paper's "
    "table 3."
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A defense with the paper's test accuracy and its average and best LPIPS for batches of 1, 16 and 32.

    variation: the weight of total variation, as published.
    """

    label: str
    paper_accuracy: float
    paper: tuple[tuple[float, float], ...]
    ratio: float | None = None
    mixing: MixUp | None = None
    variation: float = 0.05

    @property
    def on_gradients(self) -> Defense:
        return fp.chain() if self.ratio is None else Prune(self.ratio)

    @property
    def defense(self) -> Defense:
        return fp.chain(self.mixing or fp.chain(), self.on_gradients)

    def paper_leakage(self, size: int) -> str | None:
        known = dict(zip(SIZES, self.paper, strict=True))
        return f"{known[size][0]:g} / {known[size][1]:g}" if size in known else None


MIXUP, INSTAHIDE = MixUp(4), InstaHide(4)
CASES = (
    Case(label="none", paper_accuracy=93.37, paper=((0.19, 0.02), (0.45, 0.18), (0.45, 0.18))),
    Case(label="GradPrune 0.9", ratio=0.9, paper_accuracy=90.57, paper=((0.35, 0.14), (0.51, 0.31), (0.52, 0.31))),
    Case(label="GradPrune 0.99", ratio=0.99, paper_accuracy=88.61, paper=((0.52, 0.32), (0.58, 0.47), (0.58, 0.48))),
    Case(label="GradPrune 0.999", ratio=0.999, paper_accuracy=83.58, paper=((0.52, 0.36), (0.61, 0.51), (0.63, 0.54))),
    Case(
        label="MixUp 4",
        mixing=MIXUP,
        variation=0.1,
        paper_accuracy=92.31,
        paper=((0.34, 0.12), (0.34, 0.11), (0.50, 0.31)),
    ),
    Case(
        label="Intra-InstaHide 4",
        mixing=INSTAHIDE,
        variation=0.01,
        paper_accuracy=90.04,
        paper=((0.58, 0.41), (0.62, 0.41), (0.69, 0.56)),
    ),
    Case(
        label="GradPrune 0.9 + MixUp 4",
        ratio=0.9,
        mixing=MIXUP,
        variation=0.1,
        paper_accuracy=91.37,
        paper=((0.41, 0.21), (0.46, 0.22), (0.62, 0.37)),
    ),
    Case(
        label="GradPrune 0.9 + Intra-InstaHide 4",
        ratio=0.9,
        mixing=INSTAHIDE,
        variation=0.01,
        paper_accuracy=86.10,
        paper=((0.60, 0.43), (0.68, 0.54), (0.73, 0.65)),
    ),
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = photos() if settings.quick else cifar10(settings)
    sizes = settings.sizes_or(SIZES, QUICK_SIZES)
    most = max(attacked_images(case, size, settings) for case in CASES for size in sizes)
    if most > len(data.attacked):
        raise BadInput(
            f"expected at most {len(data.attacked)} images to attack, found {most}; ask for fewer or smaller batches."
        )
    targets: dict[MixUp | None, nn.Module] = {}
    undefended: utility.Utility | None = None
    for case in CASES:
        announce(f"{case.label}: training under the defense")
        price = priced(case, data, settings)
        undefended = undefended or price
        if case.mixing not in targets:
            announce(f"{case.label}: training the attacked network")
            targets[case.mixing] = attacked_network(case, data, settings)
        for size in sizes:
            yield _row(case, targets[case.mixing], data, size, price, undefended, settings, announce)


def attacked_images(case: Case, size: int, settings: Settings) -> int:
    """How many images a cell is about: full batches and, where images are mixed, at least as many as are mixed."""
    count = size * settings.batches_or(max(1, IMAGES // size))
    return count if case.mixing is None else max(count, case.mixing.k)


# --- data and networks -----------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """`train` and `test` are what networks are fed; `attacked` are the first five training images of each class."""

    name: str
    train: fp.Batch
    test: fp.Batch
    attacked: fp.Batch
    normalization: Normalization
    network: utility.Factory
    epochs: int
    batch_size: int


def cifar10(settings: Settings) -> Data:
    """CIFAR-10: of all the images in the data folder, the first 12,000 to train on and the last 3,000 to test."""
    parts = [fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("train", "test")]
    batches = [part.batch(torch.arange(len(part))) for part in parts]
    everything = fp.Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "labels")))
    if len(everything) < TRAIN + TEST:
        raise BadInput(
            f"expected at least {TRAIN + TEST:,} images of CIFAR-10, found {len(everything):,}; "
            "put more of it into the data folder."
        )
    return Data(
        "CIFAR-10",
        *_sets(everything[:TRAIN], everything[-TEST:], parts[0].classes, CIFAR),
        CIFAR,
        lambda seed: fp.models.build("resnet18", classes=parts[0].classes, seed=seed),
        epochs=30,
        batch_size=128,
    )


def photos() -> Data:
    """The quick stand-in: crops of the embedded photographs, which the network is to tell apart by the photograph."""
    images = fp.data.load("photos", size=QUICK_SIDE, crops=QUICK_CROPS)
    mixed = images.batch(torch.randperm(len(images), generator=generator(0, "held out")))
    return Data(
        "photos",
        *_sets(mixed[:-QUICK_TEST], mixed[-QUICK_TEST:], images.classes, IMAGENET),
        IMAGENET,
        lambda seed: small_network(images.classes, seed),
        epochs=5,
        batch_size=32,
    )


def _sets(
    train: fp.Batch, test: fp.Batch, classes: int, normalization: Normalization
) -> tuple[fp.Batch, fp.Batch, fp.Batch]:
    """Normalised training and test images, and those that are attacked, in the order of the data."""
    train, test = (fp.Batch(training.normalised(b.inputs, normalization), b.labels) for b in (train, test))
    first = [(train.labels == number).nonzero().flatten()[:OF_A_CLASS] for number in range(classes)]
    return train, test, train[torch.cat(first).sort().values]


def small_network(classes: int, seed: int) -> nn.Module:
    """Two convolutions with batch norm and a dense layer."""
    with seeded_layers(generator(seed, "network")):
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * (QUICK_SIDE // 2) ** 2, classes)),
        )


def priced(case: Case, data: Data, settings: Settings) -> utility.Utility:
    """Accuracy and time under the defense. The published rates: 0.05, and 0.1 with MixUp."""
    return utility.measure(
        data.network,
        data.train,
        data.test,
        case.defense,
        epochs=data.epochs,
        batch_size=data.batch_size,
        lr=0.1 if case.mixing == MIXUP else 0.05,
        seeds=[settings.seed + seed for seed in (QUICK_SEEDS if settings.quick else SEEDS)],
        device=settings.device,
        augment=training.shifted,
    )


def attacked_network(case: Case, data: Data, settings: Settings) -> nn.Module:
    """The network early in training, on mixed images where clients mix, on the CPU."""
    schedule = utility.Schedule(epochs=ATTACKED_EPOCHS, batch_size=ATTACKED_BATCH, augment=training.shifted)
    model = data.network(settings.seed)
    return utility.fit(model, data.train, case.mixing, schedule, seed=settings.seed, device=settings.device).cpu()


# --- attacks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VariationOfMagnitude:
    """Images are smooth up to the signs of their entries: weight times the total variation of |x|."""

    weight: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.weight * total_variation(inputs.abs())


def attack(case: Case, settings: Settings, *, adaptive: bool) -> GradientMatching:
    smooth: Prior = TotalVariation(case.variation)
    if adaptive and isinstance(case.mixing, InstaHide):
        smooth = VariationOfMagnitude(case.variation)
    return replace(
        bn_exact(),
        labels=Labels.KNOWN,
        priors=(smooth,),
        iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS),
        adaptive=adaptive,
    )


@dataclass
class _Attacker:
    """Attacks one batch after the other, and keeps the times and statuses."""

    case: Case
    model: nn.Module
    data: Data
    settings: Settings
    adaptive: bool
    seconds: list[float] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)

    def batch(self, client: fp.Batch) -> fp.Reconstruction:
        """What comes back of the gradient of one batch of images, or of encodings."""
        scenario = fp.Scenario(
            model=self.model, clients=[client], defense=self.case.on_gradients, normalization=self.data.normalization
        )
        if isinstance(self.case.mixing, InstaHide):  # encodings are of either sign, whatever images are
            widest = float(client.inputs.abs().max())
            scenario = replace(scenario, bounds=(-widest, widest), normalization=None)
        threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
        threat = threat.granting("defense") if self.adaptive else threat
        seed = self.settings.seed + len(self.seconds)
        observation, _ = fp.simulate(scenario, threat, seed=seed, device=self.settings.device)
        start = time.perf_counter()
        method = attack(self.case, self.settings, adaptive=self.adaptive)
        found = fp.run(method, observation, seed=seed, device=self.settings.device)
        self.seconds.append(time.perf_counter() - start)
        self.statuses.append(found.status)
        return found

    def batches(self, images: fp.Batch, size: int) -> list[fp.Reconstruction]:
        return [self.batch(images[part]) for part in torch.split(torch.arange(len(images)), size)]


def encode(case: Case, images: fp.Batch, model: nn.Module, seed: int, epoch: int) -> tuple[fp.Batch, Mixing]:
    """The encodings of all images in an epoch, and what was mixed: the first thing that is drawn."""
    assert case.mixing is not None
    context = Context(model=model, batch=images, indices=torch.arange(len(images)))
    encoded = case.mixing.on_batch(images, context, generator(seed, "encoding", epoch))
    return encoded, case.mixing.mixing(len(images), generator(seed, "encoding", epoch))


def naive(attacker: _Attacker, images: fp.Batch, size: int) -> list[fp.Reconstruction]:
    """What an attacker takes for the images who does not know that they were mixed."""
    if attacker.case.mixing is not None:
        images, _ = encode(attacker.case, images, attacker.model, attacker.settings.seed, 0)
    return attacker.batches(images, size)


def adaptive(attacker: _Attacker, images: fp.Batch, size: int) -> list[fp.Reconstruction]:
    """The same who knows the defense: of mixed images, one answer for all that were mixed."""
    case, seed = attacker.case, attacker.settings.seed
    if case.mixing is None:
        return attacker.batches(images, size)
    encodings, mixings = list[Tensor](), list[Mixing]()
    for epoch in range(QUICK_ENCODED if attacker.settings.quick else ENCODED):
        encoded, mixing = encode(case, images, attacker.model, seed, epoch)
        # Soft labels, which are given, say which encoding is which: the order is known.
        encodings += [part.inputs for part in attacker.batches(encoded, size) if part.inputs is not None]
        mixings.append(mixing)
    return [decoded(case, torch.cat(encodings), mixings, len(images), seed)]


def decoded(case: Case, encodings: Tensor, mixings: Sequence[Mixing], images: int, seed: int) -> fp.Reconstruction:
    """The images behind encodings of several epochs, (epochs * images, *input_shape)."""
    found = decode_mixtures(
        encodings,
        torch.cat([mixing.partners for mixing in mixings]),
        torch.cat([mixing.coefficients for mixing in mixings]),
        masked=isinstance(case.mixing, InstaHide),
        samples=images,
        ridge=RIDGE,
        rng=generator(seed, "decoding"),
    )
    either_way: frozenset[Ambiguity] = frozenset({"sign"}) if found.ambiguity else frozenset()
    return fp.Reconstruction(inputs=found.inputs, ambiguity=either_way, status=str(found.status))


# --- scores ----------------------------------------------------------------------------------------------------------


def _row(
    case: Case,
    model: nn.Module,
    data: Data,
    size: int,
    price: utility.Utility,
    undefended: utility.Utility,
    settings: Settings,
    announce: Announce,
) -> Row:
    count = attacked_images(case, size, settings)
    images = data.attacked[:count]
    measured: dict[str, Entry] = {}
    for name, method in {NAIVE: naive, ADAPTIVE: adaptive}.items():
        if name == ADAPTIVE and case.defense == fp.chain():
            measured[name] = None  # there is nothing to adapt to
            continue
        announce(f"{case.label}, batches of {size}: {name}")
        attacker = _Attacker(case, model, data, settings, adaptive=name == ADAPTIVE)
        measured[name] = scored(method(attacker, images, size), images, data, settings, attacker)
    measured[STRANGERS] = scored(strangers(data, count, size, settings), images, data, settings)
    picture, caption = contact_sheet({name: measured[name] for name in (NAIVE, ADAPTIVE)})
    return Row(
        cell={"defense": case.label, "n": size},
        entries={
            f"{ACCURACY}, paper": settings.paper(case.paper_accuracy),
            ACCURACY: 100 * price.accuracy,
            MARGIN: _margin(price),
            f"{DROP}, paper": settings.paper(CASES[0].paper_accuracy - case.paper_accuracy),
            DROP: 100 * (undefended.accuracy - price.accuracy),
            TIME: price.time_factor,
            "LPIPS, average / best, paper": settings.paper(case.paper_leakage(size)),
            **measured,
        },
        notes=(effort(data, settings),),
        picture=picture,
        caption=caption,
    )


def _margin(price: utility.Utility) -> float | None:
    interval = utility.t_interval(price.accuracies)
    return None if interval is None else 50 * (interval.high - interval.low)


def scored(
    answers: Sequence[fp.Reconstruction],
    images: fp.Batch,
    data: Data,
    settings: Settings,
    attacker: _Attacker | None = None,
) -> Outcome:
    """Average, best and standard deviation over all images. Each answer is matched with the images it is of."""
    found, truth, start = list[Tensor](), list[Tensor](), 0
    for answer in answers:
        assert answer.inputs is not None
        own = images[start : start + len(answer.inputs)]
        start += len(own)
        owners = ("client-0",) * len(own)
        private = fp.Truth(inputs=own.inputs, labels=own.labels, owners=owners, normalization=data.normalization)
        matched = fp.match(answer, private)
        found.append(matched.found)
        truth.append(matched.truth)
    ours, theirs = torch.cat(found), torch.cat(truth)
    decibels, distances = psnr(ours, theirs), _distances(ours, theirs, settings)
    values = {PSNR: decibels.mean(), BEST_PSNR: decibels.max(), SPREAD_PSNR: decibels.std(correction=0)}
    if distances is not None:
        values |= {LPIPS: distances.mean(), BEST_LPIPS: distances.min(), SPREAD_LPIPS: distances.std(correction=0)}
    return Outcome(
        values={name: (float(value),) for name, value in values.items()},
        seconds=tuple(attacker.seconds) if attacker is not None else (0.0,),
        statuses=(*(attacker.statuses if attacker is not None else ()), *(answer.status for answer in answers)),
        settings="" if attacker is None else repr(attack(attacker.case, settings, adaptive=attacker.adaptive)),
        pictures=(theirs[:SHOWN_IMAGES], ours[:SHOWN_IMAGES]),
    )


def strangers(data: Data, count: int, size: int, settings: Settings) -> list[fp.Reconstruction]:
    """Test images, in any order within a batch: what chance and the best assignment achieve without any update."""
    chosen = torch.randperm(len(data.test), generator=generator(settings.seed, "strangers", size))[:count]
    parts = torch.split(data.test.inputs[chosen], size)
    return [fp.Reconstruction(inputs=part, ambiguity=frozenset({"order"})) for part in parts]


def _distances(found: Tensor, truth: Tensor, settings: Settings) -> Tensor | None:
    """LPIPS (VGG) of each pair, on the device; None in a quick run for which its network is not to be had."""
    folder = None if settings.data_dir is None else Path(settings.data_dir, "weights")
    place = devices.pick(settings.device)
    try:
        return lpips(found.float().to(place), truth.float().to(place), net="vgg", weights_dir=folder).cpu()
    except LpipsUnavailable as reason:
        if not settings.quick:
            raise BadInput(str(reason)) from reason
        return None


def effort(data: Data, settings: Settings) -> str:
    seeds, encoded = (QUICK_SEEDS, QUICK_ENCODED) if settings.quick else (SEEDS, ENCODED)
    return (
        f"{data.name}: trained on {len(data.train):,} images for {data.epochs} epochs, seeds: {len(seeds)}, tested on "
        f"{len(data.test):,} others; the attacked network is trained for {ATTACKED_EPOCHS} epochs. Attacks take "
        f"{settings.iterations_or(ITERATIONS, QUICK_ITERATIONS):,} iterations (the paper: {ITERATIONS:,}), on mixed "
        f"images for each of {encoded} epochs of encodings (the paper: 20)."
    )


RECIPE = Recipe(
    name="gradattack-table-2",
    summary="Pruning, MixUp and InstaHide: accuracy, time and what leaks, ResNet-18 on CIFAR-10",
    citation="Huang et al., Evaluating Gradient Inversion Attacks and Defenses, NeurIPS 2021, table 2",
    shown=(LPIPS, BEST_LPIPS, SPREAD_LPIPS, PSNR, BEST_PSNR, SPREAD_PSNR),
    run=run,
    notes=(READING, TIMING, ATTACKERS, NULL, DIFFERENCES, COST),
)
