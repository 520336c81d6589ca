"""Tables 3 and 4 and the limits of MKOR: VGG-16 with parameters the server chose, on CIFAR-100 and ImageNet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import fedprism as fp
from fedprism.attacks import Attack, Disguise, Mkor, Reference
from fedprism.solvers import expected_singletons
from fedprism_papers.mkor import malicious_server as server
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell

SIZES, QUICK_SIZES = (100,), (8,)  # images per batch
EVERY_CLASS = 0
"""In place of a size: as many images as there are classes."""
BATCHES = 10  # per cell
NODES, QUICK_NODES = 40, 8  # per class
HIDDEN: dict[str, Attack] = {"inconspicuous, midpoint": Mkor(reference=Reference.DUMP_CLASS, disguise=Disguise())}
ITERATIONS, QUICK_ITERATIONS = 1000, 20
"""Of gradient matching. The paper lets it run for eight hours on a GPU and does not say how many these are."""
PAPER = {
    server.INVERTING: ".52, .37, 17.51 dB, 11.2 dB",
    server.FISHING: ".81, 21.56 dB (best)",
    "MKOR": ".98, .87, 33.85 dB, 24.14 dB",
}
SSIMS = (
    "SSIM is the mean over all windows inside the image; that of torchmetrics, which the paper's code takes, counts "
    "those beyond the border too, and is about .003 higher on these images."
)
PAPER_POOLLESS = {"MKOR": "1.00, 1.00, 163.6 dB, 156.7 dB"}
IMAGENET = ("ImageNet", "photographs of ImageNet", 1000, 100)
CIFAR100 = ("CIFAR-100", "images of CIFAR-100 enlarged to 224 pixels, at which they are scored", 100, 50)
"""Name, what images there are, classes, and the most images of a client, which a GPU has the memory for."""
IMAGENET_NODES = 4
"""As many nodes a class as VGG-16's first dense layer has room for with a thousand classes."""
NOISE = 0.1


class Line(NamedTuple):
    imagenet: bool
    unique: bool
    noise: float
    paper: str
    poolless: bool = False


LINES = (
    Line(True, True, 0.0, ".93, .48, 30.12 dB, 17.88 dB"),
    Line(True, True, NOISE, ".92, .45, 29.99 dB, 17.50 dB"),
    Line(False, False, 0.0, ".90, .42, 30.05 dB, 15.05 dB"),
    Line(False, False, NOISE, ".88, .41, 26.44 dB, 14.80 dB"),
    Line(True, True, 0.0, "1.00, 1.00, inf, inf", poolless=True),
    Line(True, True, NOISE, ".97, .80, 31.24 dB, 31.00 dB", poolless=True),
    Line(False, False, 0.0, "1.00, .72, inf, inf", poolless=True),
    Line(False, False, NOISE, ".88, .52, 28.37 dB, 17.63 dB", poolless=True),
)
RANDOM = (
    "The paper draws 1000 ImageNet images of random classes; there is one photograph a class here, so that the random "
    "lines are 100 images of CIFAR-100: like the paper's, as many as there are classes."
)
DETAIL = "On ImageNet's photographs, full of detail, 'smoothest' answers with half of it and half of the midpoint."
PREDICTED = "predicted alone"


def vgg16(data: tuple[str, str, int, int], settings: Settings) -> server.Victim:
    """torchvision's VGG-16 on the test images of a data set; the small chain for a quick run."""
    if settings.quick:
        return server.small_chain(settings)
    name, about, classes, client_images = data
    images = fp.data.load(name.replace("-", "").lower(), split="test", data_dir=settings.data_dir)
    model = fp.models.build("vgg16", classes=classes, dropout=0.0, seed=settings.seed)
    note = (
        f"VGG-16 with zero padding, fresh parameters before the server changed them, no dropout; {len(images):,} "
        f"{about}. Gradients are means of clients of at most {client_images} images."
    )
    return server.Victim(name=name, model=model, images=images, side=224, note=note, client_images=client_images)


def table_3(settings: Settings, announce: Announce) -> Iterator[Row]:
    original = vgg16(CIFAR100, settings)
    nodes = QUICK_NODES if settings.quick else NODES
    iterations = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)
    matching = server.gradient_matching(iterations)
    networks: dict[str, tuple[server.Victim, dict[str, Attack], dict[str, str]]] = {
        "chain" if settings.quick else "VGG-16": (
            original,
            {**matching, **server.decoders(nodes, settings), **HIDDEN},
            PAPER,
        ),
        server.POOLLESS: (server.poolless(original, settings), server.only_midpoint(), PAPER_POOLLESS),
    }
    for (network, (victim, attacks, paper)), size in product(networks.items(), settings.sizes_or(SIZES, QUICK_SIZES)):
        batches = settings.batches_or(BATCHES)
        line: dict[str, str | int] = {"network": network, "data": victim.name, "n": size, "batches": batches}
        if not settings.wants(line):
            continue
        cell = server.ChosenParameters(victim=victim, size=size, batches=batches)
        entries = attack_cell(cell, attacks, settings, announce, f"{network}, {victim.name}, {size} images").entries
        yield Row(
            cell=line,
            entries={
                **{f"{name}, paper": settings.paper(text if size == 100 else None) for name, text in paper.items()},
                **entries,
            },
            notes=(victim.note, f"The baselines take {iterations:,} iterations."),
        )


def table_4(settings: Settings, announce: Announce) -> Iterator[Row]:
    victims = dict[tuple[bool, bool], server.Victim]()
    for line, asked in product(LINES, settings.sizes_or((EVERY_CLASS,), QUICK_SIZES)):
        if (line.imagenet, line.poolless) not in victims:
            victims.clear()  # one network of this size at a time
            victim = vgg16(IMAGENET if line.imagenet else CIFAR100, settings)
            victims[line.imagenet, line.poolless] = server.poolless(victim, settings) if line.poolless else victim
        victim = victims[line.imagenet, line.poolless]
        size = victim.images.classes if asked == EVERY_CLASS else asked
        labels = "unique" if line.unique else "random"
        network = server.POOLLESS if line.poolless else "chain" if settings.quick else "VGG-16"
        first: dict[str, str | int | float] = {
            "network": network,
            "data": victim.name,
            "n": size,
            "labels": labels,
            "noise": line.noise or "none",
        }
        if not settings.wants(first):
            continue
        cell = server.ChosenParameters(
            victim=victim, size=size, batches=settings.batches_or(1), unique=line.unique, noise=line.noise
        )
        title = f"{network}, {victim.name}, {labels} labels, noise {line.noise}"
        entries = attack_cell(cell, _methods(line, settings), settings, announce, title).entries
        yield Row(
            cell=first,
            entries={
                f"paper: {server.ORDER}": settings.paper(line.paper),
                PREDICTED: None if line.unique else expected_singletons([1] * victim.images.classes, size) / size,
                **entries,
            },
            notes=(victim.note,),
        )


def _methods(line: Line, settings: Settings) -> dict[str, Attack]:
    if line.poolless:
        return server.only_midpoint()
    nodes = IMAGENET_NODES if line.imagenet else NODES
    middle = 0.5 if line.imagenet and not settings.quick else 0.0
    return server.decoders(QUICK_NODES if settings.quick else nodes, settings, middle)


TABLE_3 = Recipe(
    name="mkor-table-3",
    summary="MKOR, VGG-16 on CIFAR-100, one image a class, beside inverting gradients and class fishing",
    citation=f"{server.CITATION}, table 3",
    shown=server.SHOWN,
    run=table_3,
    options=("sizes", "batches", "iterations", "only"),
    notes=(f"The paper's numbers: {server.ORDER}.", server.FISHED, server.LOSS, server.DECODERS, SSIMS, server.SCORED),
)
TABLE_4 = Recipe(
    name="mkor-table-4",
    summary="MKOR, VGG-16: a thousand photographs, repeated classes, noise on the gradient",
    citation=f"{server.CITATION}, table 4 and equation 3",
    shown=(*server.SHOWN, server.ALONE),
    run=table_4,
    options=("sizes", "batches", "iterations", "only"),
    notes=(RANDOM, DETAIL, server.LOSS, server.DECODERS, server.SCORED),
)
