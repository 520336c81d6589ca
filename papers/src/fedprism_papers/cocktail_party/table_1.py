"""Table 1: images from a fully connected network's gradient (GIA) or federated-averaging update (UIA)."""

from __future__ import annotations

from collections.abc import Iterator

import fedprism as fp
from fedprism.client.update import Protocol
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import VictimBatches
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell
from fedprism_papers.shared.measuring import LPIPS, OVER_40_DB, PSNR
from fedprism_papers.shared.victims import fc2_cifar10, fc2_photos, fc2_tiny_imagenet

SIZES, QUICK_SIZES = (32, 64, 128, 256), (8, 16)
BATCHES = 5
FEDAVG = fp.FedAvg(lr=1e-3, epochs=10, batch_size=32)
TRAINING = f"FedAvg: {FEDAVG.epochs} epochs of SGD with rate {FEDAVG.lr}, batches of {FEDAVG.batch_size}, shuffled."
UPDATES: dict[str, Protocol] = {"gradient": fp.FedSGD(), "FedAvg": FEDAVG}

# LPIPS by data, update, method and batch size.
PAPER = {
    ("CIFAR-10", "gradient", "GMA"): (0.491, 0.569, 0.610, 0.614),
    ("CIFAR-10", "gradient", "CPA"): (0.197, 0.352, 0.521, 0.610),
    ("CIFAR-10", "FedAvg", "GMA"): (0.468, 0.553, 0.622, 0.634),
    ("CIFAR-10", "FedAvg", "CPA"): (0.21, 0.360, 0.607, 0.631),
    ("Tiny-ImageNet", "gradient", "GMA"): (0.368, 0.620, 0.687, 0.720),
    ("Tiny-ImageNet", "gradient", "CPA"): (0.164, 0.217, 0.232, 0.388),
    ("Tiny-ImageNet", "FedAvg", "GMA"): (0.403, 0.637, 0.689, 0.708),
    ("Tiny-ImageNet", "FedAvg", "CPA"): (0.166, 0.213, 0.235, 0.384),
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for make in (fc2_photos,) if settings.quick else (fc2_cifar10, fc2_tiny_imagenet):
        announce("training the network")
        victim = make(settings)
        for update, protocol in UPDATES.items():
            for size in settings.sizes_or(SIZES, QUICK_SIZES):
                batches = settings.batches_or(BATCHES)
                attacked = VictimBatches(victim=victim, size=size, batches=batches, protocol=protocol)
                title = f"{victim.name}, {update}, {size} images"
                outcomes = attack_cell(attacked, cpa.on_images(settings), settings, announce, title)
                cell: dict[str, str | int] = {"data": victim.name, "update": update, "n": size}
                yield cpa.row(cell, victim, outcomes, _paper(victim.name, update, size), settings)


def _paper(data: str, update: str, size: int) -> dict[str, float | str | None]:
    """What the paper has for this cell; the quick data are not the paper's."""
    numbers = {cpa.GMA: PAPER.get((data, update, "GMA")), cpa.PUBLISHED: PAPER.get((data, update, "CPA"))}
    return {name: cpa.by_size(SIZES, values, size) if values else None for name, values in numbers.items()}


RECIPE = Recipe(
    name="cpa-table-1",
    summary="Cocktail Party Attack, FC-2 on CIFAR-10 and Tiny-ImageNet, gradients and FedAvg updates",
    citation=f"{cpa.CITATION}, table 1",
    shown=(LPIPS, PSNR, OVER_40_DB),
    run=run,
    notes=(TRAINING, cpa.SCORED, cpa.BASELINE, cpa.TUNING),
)
