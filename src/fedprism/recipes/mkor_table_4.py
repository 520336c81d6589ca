"""Table 4: a thousand photographs, and batches with repeated classes, with and without noise on the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.recipes import mkor
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.mkor_table_3 import NODES, QUICK_NODES, cifar100_vgg16
from fedprism.recipes.sheets import contact_sheet

CLIENT_IMAGES = 100
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


def imagenet_vgg16(settings: Settings) -> mkor.Victim:
    """torchvision's VGG-16 on photographs of ImageNet, one a class."""
    images = fp.data.load("imagenet", split="test", data_dir=settings.data_dir)
    model = fp.models.build("vgg16", classes=1000, dropout=0.0, seed=settings.seed)
    note = (
        f"VGG-16 with zero padding, fresh parameters before the server changed them, no dropout; {len(images):,} "
        f"photographs of ImageNet. Gradients are means of clients of at most {CLIENT_IMAGES} images."
    )
    return mkor.Victim(name="ImageNet", model=model, images=images, side=224, note=note, client_images=CLIENT_IMAGES)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    victims = dict[tuple[bool, bool], mkor.Victim]()
    for line in LINES:
        if (line.imagenet, line.poolless) not in victims:
            victims.clear()  # one network of this size at a time
            victims[line.imagenet, line.poolless] = _victim(line, settings)
        victim = victims[line.imagenet, line.poolless]
        size = settings.sizes_or((victim.images.classes,), (8,))[0]
        cell = mkor.Cell(victim=victim, size=size, batches=settings.batches_or(1), unique=line.unique, noise=line.noise)
        labels = "unique" if line.unique else "random"
        network = mkor.POOLLESS if line.poolless else "chain" if settings.quick else "VGG-16"
        title = f"{network}, {victim.name}, {labels} labels, noise {line.noise}"
        entries = mkor.play(cell, _attacks(line, settings), settings, announce, title)
        picture, caption = contact_sheet(entries)
        yield Row(
            cell={"network": network, "data": victim.name, "n": size, "labels": labels, "noise": line.noise or "none"},
            entries={
                f"paper: {mkor.ORDER}": settings.paper(line.paper),
                PREDICTED: None if line.unique else mkor.alone(size, victim.images.classes) / size,
                **entries,
            },
            notes=(victim.note,),
            picture=picture,
            caption=caption,
        )


def _victim(line: Line, settings: Settings) -> mkor.Victim:
    make = imagenet_vgg16 if line.imagenet else cifar100_vgg16
    victim = mkor.small_chain(settings) if settings.quick else make(settings)
    return mkor.poolless(victim, settings) if line.poolless else victim


def _attacks(line: Line, settings: Settings) -> dict[str, Attack]:
    if line.poolless:
        return mkor.only_midpoint()
    nodes = IMAGENET_NODES if line.imagenet else NODES
    middle = 0.5 if line.imagenet and not settings.quick else 0.0
    return mkor.decoders(QUICK_NODES if settings.quick else nodes, settings, middle)


RECIPE = Recipe(
    name="mkor-table-4",
    summary="MKOR, VGG-16: a thousand photographs, repeated classes, noise on the gradient",
    citation=f"{mkor.CITATION}, table 4 and equation 3",
    shown=(*mkor.SHOWN, mkor.ALONE),
    run=run,
    notes=(RANDOM, DETAIL, mkor.LOSS, mkor.DECODERS, mkor.SCORED),
)
