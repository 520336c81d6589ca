"""What stops the Cocktail Party Attack: one defense after another, and our attack on each. Not a table of the paper's.

Every row is an update under one defense, attacked twice: by separation alone, and with the exact stage behind it. The
attacker knows what an honest-but-curious server knows and is not told of the defense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import CocktailParty
from fedprism.client.update import Protocol
from fedprism.defenses import Cast, Clip, Defense, DpSgd, Prune, Quantize
from fedprism.metrics import psnr
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator, seeded_layers
from fedprism.solvers import ExactStatus
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import VictimBatches
from fedprism_papers.cocktail_party.tables_1_3_and_4 import unit_norm
from fedprism_papers.shared import training
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings
from fedprism_papers.shared.cells import Attacked, AttackTrial, attack_cell, by_metric
from fedprism_papers.shared.measuring import ANSWERED, HIGH_PSNR, OVER_40_DB, PSNR, SHOWN_IMAGES, Scores
from fedprism_papers.shared.victims import CIFAR, IMAGENET, Victim, part

SIZES, NOISE_SIZES, QUICK_SIZES = (8, 32), (1, 8, 32), (8,)  # images per batch
BATCHES = 3
"""Batches of a cell."""
TRAINED_ON = 5_000
"""How many of the training images, the first ones, every network is trained on: there are nine networks."""
QUICK_SIDE, QUICK_CROPS, QUICK_ATTACKED, QUICK_EPOCHS = 16, 64, 256, 5  # pixels, crops per photograph, images, epochs
GOOD_PSNR = 25.0
"""Decibels above which an image is good: plainly recognised."""
BEST, WORST, GOOD, LIKENESS = "best PSNR", "worst PSNR", "over 25 dB", "correlation"
CONFIRMED = "confirmed"
STRANGERS, MEAN_IMAGE, CERTIFICATE = "other images", "PSNR of the mean image", "what the attacker can tell"
READING = (
    f"Beside the mean PSNR: that of the best and of the worst image of a batch, the fractions of images {GOOD} and "
    f"{OVER_40_DB}, and the correlation of images and answers whatever their brightness, contrast and sign. All are "
    "means over the batches. PSNR and correlation are over the images that were given an answer, fractions are of all."
)
NULL = (
    f"{STRANGERS}: training images, as many as the attack answers, assigned in the same way: what chance and the best "
    "assignment achieve without any update. An attack that is not above that has recovered nothing."
)
ATTACKER = (
    "The attacker knows what an honest-but-curious server knows and is not told of the defense. What the defenses cost "
    "in accuracy is not measured."
)
TRAINING = "Local training is SGD with batches of 8. Clients hold equally many images; the server sees their mean."
VERDICTS = (
    f"{CERTIFICATE}: exact, the update recomputed from the answer is the observed one; uneven, it is if images may "
    "count differently; confirmed and partial, all or some images are confirmed by the units that they leave silent, "
    "where some, up to traces of the others; otherwise why nothing is confirmed."
)


@dataclass(frozen=True, kw_only=True)
class Net:
    """The network that clients train: two dense layers, and what stands between them. `narrow`: a quarter as wide."""

    activation: Callable[[], nn.Module] = nn.ReLU
    dropout: float = 0.0
    bias: bool = True
    narrow: bool = False

    def width(self, settings: Settings) -> int:
        return (64 if settings.quick else 256) // (4 if self.narrow else 1)

    def build(self, shape: Sequence[int], classes: int, settings: Settings) -> nn.Module:
        features, width = torch.Size(shape).numel(), self.width(settings)
        between = [self.activation(), *([nn.Dropout(self.dropout)] if self.dropout else [])]
        with seeded_layers(generator(settings.seed, "network")):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(features, width, bias=self.bias), *between, nn.Linear(width, classes)
            )


@dataclass(frozen=True)
class Case:
    """One line of the study, or one for each of `sizes`."""

    axis: str
    strength: str
    defense: Defense = field(default_factory=fp.chain)
    net: Net = Net()
    protocol: Protocol = field(default_factory=fp.FedSGD)
    clients: int = 1
    """How many hold equal parts of the images; the server sees the mean of their updates."""
    sizes: tuple[int, ...] = SIZES
    ratio: float | None = None
    """Images a unit of the first layer, instead of `sizes`."""
    quick: bool = False

    def batch_sizes(self, settings: Settings) -> tuple[int, ...]:
        if self.ratio is not None:
            return (round(self.ratio * self.net.width(settings)),)
        return settings.sizes_or(self.sizes, QUICK_SIZES)


def local_training(lr: float, epochs: int) -> Protocol:
    return fp.FedAvg(lr=lr, epochs=epochs, batch_size=8)


NARROW = Net(narrow=True)
SINGLE = (
    Case("nothing", "plain gradient", quick=True),
    Case("clipping", "update to length 1", Clip(1.0)),
    Case("clipping", "each example to length 1", DpSgd(0.0, clip=1.0)),
    *(
        Case("noise, update of length 1", f"{std:g}", unit_norm(std), sizes=NOISE_SIZES, quick=std in (1e-4, 1e-2))
        for std in (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    ),
    *(
        Case("DP-SGD, clip 1", f"noise {noise:g}", DpSgd(noise, clip=1.0), sizes=NOISE_SIZES, quick=noise == 0.1)
        for noise in (1e-4, 1e-3, 0.01, 0.1, 1.0)
    ),
    *(Case("pruning", f"{ratio:.0%}", Prune(ratio), quick=ratio == 0.9) for ratio in (0.5, 0.9, 0.97, 0.99)),
    *(Case("quantization", f"{bits} bits", Quantize(bits), quick=bits == 8) for bits in (8, 4, 2, 1)),
    *(Case("short floats", dtype, Cast(dtype), quick=dtype == "bfloat16") for dtype in ("float16", "bfloat16")),
)
NETWORKS = (
    Case("first layer", "without bias", net=Net(bias=False), quick=True),
    *(
        Case("activation", activation.__name__, net=Net(activation=activation), quick=quick)
        for activation, quick in ((nn.LeakyReLU, False), (nn.GELU, False), (nn.Tanh, False), (nn.Sigmoid, True))
    ),
    *(Case("dropout", f"{rate:g}", net=Net(dropout=rate), quick=rate == 0.5) for rate in (0.1, 0.5)),
)
PROTOCOLS = (
    *(
        Case("images a unit", f"{ratio:g}", net=NARROW, ratio=ratio, quick=ratio in (0.75, 2))
        for ratio in (0.125, 0.5, 0.75, 0.875, 1, 1.5, 2, 4)
    ),
    *(
        Case(
            "sum over clients",
            f"{clients} clients, {ratio:g} images a unit",
            net=net,
            clients=clients,
            ratio=ratio,
            quick=clients == 4,
        )
        for net, clients, ratio in ((NARROW, 4, 0.5), (NARROW, 8, 1), (NARROW, 16, 2), (Net(), 16, 0.5))
    ),
    *(
        Case(
            "local training",
            f"{epochs} epochs, rate {lr:g}",
            protocol=local_training(lr, epochs),
            quick=(lr, epochs) == (0.01, 10),
        )
        for lr, epochs in ((0.001, 10), (0.01, 10), (0.01, 50), (0.1, 10), (0.3, 10))
    ),
)
FOUR = "4 clients"
SUMMED: dict[str, Any] = {"clients": 4, "ratio": 0.125}
LONG = local_training(0.01, 10)
COMBINED = tuple(
    Case("combined", strength, defense, **fields)
    for strength, defense, fields in (
        (f"bfloat16, {FOUR}", Cast("bfloat16"), SUMMED),
        (f"10 epochs, rate 0.01, 8 bits, {FOUR}", Quantize(8), {"protocol": LONG, **SUMMED}),
        ("10 epochs, rate 0.01, pruning 90%, 8 bits", fp.chain(Prune(0.9), Quantize(8)), {"protocol": LONG}),
        *((f"noise {std:g} by each of {FOUR}", unit_norm(std), SUMMED) for std in (1e-5, 1e-4)),
        (f"DP-SGD, noise 0.001 by each of {FOUR}", DpSgd(1e-3, clip=1.0), SUMMED),
        ("1.5 images a unit, bfloat16", Cast("bfloat16"), {"net": NARROW, "ratio": 1.5}),
        ("1.5 images a unit, noise 1e-05", unit_norm(1e-5), {"net": NARROW, "ratio": 1.5}),
    )
)
CASES = (*SINGLE, *NETWORKS, *PROTOCOLS, *COMBINED)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = photos() if settings.quick else cifar10(settings)
    targets: dict[Net, Victim] = {}
    for case in CASES:
        if settings.quick and not case.quick:
            continue
        for size in case.batch_sizes(settings):
            if not settings.wants({"defense": case.axis, "strength": case.strength, "n": size}):
                continue
            if case.net not in targets:
                announce(f"{case.axis}, {case.strength}: training the network")
                targets[case.net] = target(case.net, data, settings)
            yield _row(case, targets[case.net], data, size, settings, announce)


class Data(NamedTuple):
    name: str
    train: fp.Batch
    """Pixels in [0, 1]."""
    attacked: fp.data.ImageSet
    normalization: Normalization
    epochs: int


def cifar10(settings: Settings) -> Data:
    train, test = (fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("train", "test"))
    first = train.batch(torch.arange(min(TRAINED_ON, len(train))))
    return Data("CIFAR-10", first, test, CIFAR, training.EPOCHS)


def photos() -> Data:
    """The quick stand-in: small crops of the embedded photographs, of which some are not trained on but attacked."""
    images = fp.data.load("photos", size=QUICK_SIDE, crops=QUICK_CROPS)
    mixed = torch.randperm(len(images), generator=generator(0, "held out"))
    train, chosen = images.batch(mixed[:-QUICK_ATTACKED]), mixed[-QUICK_ATTACKED:]
    return Data("photos", train, part(images, chosen), IMAGENET, QUICK_EPOCHS)


def target(net: Net, data: Data, settings: Settings) -> Victim:
    """The network, trained as in the recipes of the paper's tables."""
    model = net.build(data.train.tensor.shape[1:], data.attacked.classes, settings)
    with seeded_layers(generator(settings.seed, "dropout")):
        training.train(
            model,
            data.train,
            augment=training.shifted,
            normalization=data.normalization,
            epochs=data.epochs,
            seed=settings.seed,
            device=settings.device,
        )
    note = (
        f"{data.name}: networks of two dense layers, {Net().width(settings)} units or, for images a unit, "
        f"{NARROW.width(settings)}, each trained for {data.epochs} epochs on {len(data.train):,} images; batches are "
        f"drawn from {len(data.attacked):,} others."
    )
    return Victim(name=data.name, model=model, images=data.attacked, normalization=data.normalization, note=note)


ATTACKS: dict[str, CocktailParty] = {cpa.ICA: cpa.ours(exact=False), cpa.OURS: cpa.ours()}


@dataclass(frozen=True, kw_only=True)
class DefendedBatches(VictimBatches):
    """Batches under a defense. Every image is given its best answer by pixels, whatever features say."""

    needs_lpips: ClassVar[bool] = False
    first_stage = Attacked.first_stage

    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: fp.Truth) -> Scores:
        return pixel_scores(answer, truth)


def pixel_scores(answer: fp.Reconstruction, truth: fp.Truth) -> Scores:
    matched = fp.match(answer, truth)
    answered = torch.tensor([row is not None for row in matched.rows])
    decibels = psnr(matched.recovered[answered], matched.truth[answered])
    values = {
        PSNR: float(decibels.mean()),
        BEST: float(decibels.max()),
        WORST: float(decibels.min()),
        GOOD: float((decibels > GOOD_PSNR).sum()) / len(answered),
        OVER_40_DB: float((decibels > HIGH_PSNR).sum()) / len(answered),
        LIKENESS: float(correlations(answer, truth, matched.rows).mean()),
        CONFIRMED: float(answer.diagnostics.get("confirmed") or 0) / len(answered),
        ANSWERED: float(answered.double().mean()),
    }
    return Scores(values, {"originals": matched.truth[:SHOWN_IMAGES], "recovered": matched.recovered[:SHOWN_IMAGES]})


def _row(case: Case, victim: Victim, data: Data, size: int, settings: Settings, announce: Announce) -> Row:
    attacked = DefendedBatches(
        victim=replace(victim, client_images=size // case.clients),
        size=size,
        batches=settings.batches_or(BATCHES),
        protocol=case.protocol,
        defense=case.defense,
    )
    title = f"{case.axis}, {case.strength}, {size} images"
    entries = attack_cell(attacked, ATTACKS, settings, announce, title).entries
    ours = entries[cpa.OURS]
    assert isinstance(ours, Measured)
    chance, blind = list[dict[str, float]](), list[float]()
    for number, answered in enumerate(ours.values[ANSWERED]):
        _, truth = attacked.observe(None, number, settings)
        others = strangers(data, round(answered * size), generator(settings.seed, "strangers", size, number))
        chance.append(pixel_scores(others, truth).values)
        blind.append(pixel_scores(mean_image(data, size), truth).values[PSNR])
    nobody = Measured(
        values=by_metric(chance), seconds=(0.0,) * len(chance), statuses=("",) * len(chance), settings=repr(STRANGERS)
    )
    return Row(
        cell={"defense": case.axis, "strength": case.strength, "n": size},
        entries={
            **entries,
            STRANGERS: nobody,
            MEAN_IMAGE: sum(blind) / len(blind),
            CERTIFICATE: verdicts(ours.statuses),
        },
        notes=(victim.note,),
    )


def strangers(data: Data, count: int, rng: torch.Generator) -> fp.Reconstruction:
    """Images that nobody attacked, in any order."""
    chosen = torch.randperm(len(data.train), generator=rng)[:count]
    inputs = to_inputs(data.train.tensor[chosen], data.normalization)
    return fp.Reconstruction(inputs=inputs, ambiguity=frozenset({"order"}))


def mean_image(data: Data, count: int) -> fp.Reconstruction:
    """The mean image of the data set as the answer to every image."""
    mean = data.train.tensor.mean(0).expand(count, -1, -1, -1)
    return fp.Reconstruction(inputs=to_inputs(mean, data.normalization))


def correlations(answer: fp.Reconstruction, truth: fp.Truth, rows: Sequence[int | None]) -> Tensor:
    """How alike each answered image and its answer are, whatever brightness, contrast and sign: |correlation|."""
    assert answer.inputs is not None
    pairs = [(row, sample) for sample, row in enumerate(rows) if row is not None]
    ours = answer.tensor[[row for row, _ in pairs]].double().flatten(1)
    theirs = truth.tensor[[sample for _, sample in pairs]].double().flatten(1)
    ours, theirs = (x - x.mean(1, keepdim=True) for x in (ours, theirs))
    return torch.nn.functional.cosine_similarity(ours, theirs).abs()


def verdicts(statuses: Sequence[str]) -> str:
    """What the exact stage says of its answers: the status of most batches first."""
    names = Counter(ExactStatus(status).name.lower().replace("_", " ") for status in statuses)
    return ", ".join(name if len(names) == 1 else f"{name} {count}x" for name, count in names.most_common())


RECIPE = Recipe(
    name="cpa-defenses",
    summary="What stops the Cocktail Party Attack: FC-2 on CIFAR-10 under noise, pruning, large batches and others",
    citation=f"No table of a paper: defenses against our form of {cpa.CITATION}",
    shown=(PSNR, BEST, WORST, GOOD, OVER_40_DB, LIKENESS),
    run=run,
    options=("sizes", "batches", "only"),
    notes=(READING, NULL, VERDICTS, ATTACKER, TRAINING),
)
