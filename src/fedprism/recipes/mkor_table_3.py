"""Table 3: a hundred images of different classes from the gradient of VGG-16, whose parameters the server chose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import fedprism as fp
from fedprism.attacks import Attack, Disguise, Mkor, Reference
from fedprism.recipes import mkor
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.sheets import contact_sheet

SIZES, QUICK_SIZES = (100,), (8,)
BATCHES = 10
CLIENT_IMAGES = 50
NODES, QUICK_NODES = 40, 8
HIDDEN = "inconspicuous, midpoint"
PAPER = ".98, .87, 33.85 dB, 24.14 dB"
SSIMS = (
    "SSIM is the mean over all windows inside the image; that of torchmetrics, which the paper's code takes, counts "
    "those beyond the border too, and is about .003 higher on these images."
)
PAPER_POOLLESS = "1.00, 1.00, 163.6 dB, 156.7 dB"


def cifar100_vgg16(settings: Settings) -> mkor.Victim:
    """torchvision's VGG-16 with a hundred classes, on CIFAR-100's test images enlarged to 224 pixels."""
    images = fp.data.load("cifar100", split="test", data_dir=settings.data_dir)
    model = fp.models.build("vgg16", classes=images.classes, dropout=0.0, seed=settings.seed)
    note = (
        f"VGG-16 with zero padding, fresh parameters before the server changed them, no dropout; {len(images):,} "
        f"images of CIFAR-100 enlarged to 224 pixels, at which they are scored. Gradients are means of clients of at "
        f"most {CLIENT_IMAGES} images."
    )
    return mkor.Victim(name="CIFAR-100", model=model, images=images, side=224, note=note, client_images=CLIENT_IMAGES)


def methods(settings: Settings) -> dict[str, Attack]:
    return {
        **mkor.decoders(QUICK_NODES if settings.quick else NODES, settings),
        HIDDEN: Mkor(reference=Reference.DUMP_CLASS, disguise=Disguise()),
    }


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    original = mkor.small_chain(settings) if settings.quick else cifar100_vgg16(settings)
    networks: dict[str, tuple[mkor.Victim, dict[str, Attack], str]] = {
        "chain" if settings.quick else "VGG-16": (original, methods(settings), PAPER),
        mkor.POOLLESS: (mkor.poolless(original, settings), mkor.only_midpoint(), PAPER_POOLLESS),
    }
    for (network, (victim, attacks, paper)), size in product(networks.items(), settings.sizes_or(SIZES, QUICK_SIZES)):
        cell = mkor.Cell(victim=victim, size=size, batches=settings.batches_or(BATCHES))
        entries = mkor.play(cell, attacks, settings, announce, f"{network}, {victim.name}, {size} images")
        picture, caption = contact_sheet(entries)
        yield Row(
            cell={"network": network, "data": victim.name, "n": size, "batches": cell.batches},
            entries={f"paper: {mkor.ORDER}": settings.paper(paper if size == 100 else None), **entries},
            notes=(victim.note,),
            picture=picture,
            caption=caption,
        )


RECIPE = Recipe(
    name="mkor-table-3",
    summary="MKOR, VGG-16 on CIFAR-100, one image a class",
    citation=f"{mkor.CITATION}, table 3",
    shown=mkor.SHOWN,
    run=run,
    notes=(mkor.LOSS, mkor.DECODERS, SSIMS, mkor.SCORED),
)
