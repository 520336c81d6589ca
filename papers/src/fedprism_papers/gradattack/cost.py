"""What an attack on mixed data costs, end to end.

The model of Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning",
NeurIPS 2021 (table 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedprism.checks import whole
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings

EPOCHS, BATCH_SIZE, KNOWN_IMAGES = 50, 128, 10_000
"""Epochs that mix anew, encodings that are inverted together, and images to learn from: the paper's."""
HOURS_A_BATCH, NETWORK_HOURS, PAIRING_HOURS = 0.25, 10.0, 1 / 6
"""GPU hours to invert a batch, to train the network and to pair `PAIRED_ENCODINGS`: the paper's."""
PAIRED_ENCODINGS = 5_000
"""How many encodings the published time for pairing is about."""


class AttackCost(NamedTuple):
    """GPU hours of each part of an attack on data that was mixed, end to end."""

    inversion: float
    """recovering the private encodings from gradients"""
    examples: float
    """recovering encodings of known images, to learn from what recovered encodings look like"""
    network: float
    """training the network that tells which encodings share an image"""
    pairing: float
    """asking it about every pair of private encodings"""

    @property
    def total(self) -> float:
        return sum(self)


def attack_cost(images: int) -> AttackCost:
    """GPU hours until this many private images are recovered: (N T / b) t + (n / b) t + 10 + (N T / 5000)² / 6."""
    encodings = whole(images, "images", 2**53) * EPOCHS
    return AttackCost(
        inversion=encodings / BATCH_SIZE * HOURS_A_BATCH,
        examples=KNOWN_IMAGES / BATCH_SIZE * HOURS_A_BATCH,
        network=NETWORK_HOURS,
        pairing=PAIRING_HOURS * (encodings / PAIRED_ENCODINGS) ** 2,
    )


PAPER = {5_000: 934.48, 50_000: 46_579.01, 500_000: 4_215_524.32}
"""GPU hours by the number of private images."""
TOTAL = "total"


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for images in settings.sizes_or(tuple(PAPER), tuple(PAPER)):
        if settings.wants({"images": images}):
            announce(f"{images:,} images")
            cost = attack_cost(images)
            hours = {**cost._asdict(), TOTAL: cost.total}
            by_formula = Measured(values={name: (value,) for name, value in hours.items()}, seconds=(0.0,))
            known = {"paper": settings.paper(PAPER.get(images)), "without a defense, paper": HOURS_A_BATCH}
            shares = {f"{name}, %": 100 * hours[name] / cost.total for name in ("inversion", "pairing")}
            yield Row(cell={"images": images}, entries={**known, "by the formula": by_formula, **shares})


RECIPE = Recipe(
    name="gradattack-table-3",
    summary="GPU hours to find out what InstaHide mixed and recover an image, by the paper's formula",
    citation=f"{inversion.CITATION}, table 3",
    shown=(*AttackCost._fields, TOTAL),
    run=run,
    options=("sizes", "only"),
    notes=("Hours of an RTX 2080 Ti, worked out from the paper's times of the parts; nothing is timed here.",),
)
