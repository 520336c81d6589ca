"""Figure 7: how close recovered features come to the true ones, by batch size and by the number of features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprism.attacks import Attack
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import BINS, CLOSE, COSINE, COSINES, MEDIAN_COSINE, VictimBatches
from fedprism_papers.cocktail_party.tables_2_and_5 import BATCHES
from fedprism_papers.shared.base import Announce, Entry, Outcome, Recipe, Row, Settings
from fedprism_papers.shared.cells import Outcomes, TableCell, attack_cells
from fedprism_papers.shared.sheets import bar_chart, sparkline
from fedprism_papers.shared.victims import cnn_photos, vgg16_imagenet

SIZES, QUICK_SIZES = tuple(BATCHES), (8, 16)
POOLS, QUICK_POOLS = (7, 4, 2, 1), (8, 4, 2)
FEWER_SIZES = (32, 128)
"""Batch sizes for networks with fewer features than published."""


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    make, cells = cnn_photos if settings.quick else vgg16_imagenet, list[TableCell]()
    for number, pool in enumerate(QUICK_POOLS if settings.quick else POOLS):
        victim = make(settings, pool=pool)
        for size in settings.sizes_or(FEWER_SIZES if number else SIZES, QUICK_SIZES[number > 0 :]):
            if size < victim.features:  # as many images as features cannot be told apart
                batches = settings.batches_or(BATCHES.get(size, 1))
                attacked = VictimBatches(victim=victim, size=size, batches=batches)
                cells.append(TableCell(attacked, methods(settings), f"{victim.features} features, {size} images"))
    for cell, outcomes in zip(cells, attack_cells(cells, settings, announce), strict=True):
        assert isinstance(cell.attacked, VictimBatches)
        yield row(cell.attacked, outcomes, settings)


def methods(settings: Settings) -> dict[str, Attack]:
    """Features only: no image is rendered."""
    return {
        cpa.PUBLISHED: cpa.published(cpa.feature_objective(settings), images=0),
        cpa.ICA: cpa.ours(exact=False, images=0),
        cpa.OURS: cpa.ours(images=0),
    }


def row(attacked: VictimBatches, outcomes: Outcomes, settings: Settings) -> Row:
    victim, (entries, notes) = attacked.victim, outcomes
    counts = _counts(entries[cpa.OURS])
    return Row(
        cell={"data": victim.name, "features": victim.features, "n": attacked.size, "batches": attacked.batches},
        entries={**entries, "ours, from 0 to 1": f"[{sparkline(counts)}]"},
        notes=(victim.note, cpa.effort(settings), *notes),
        picture=bar_chart(counts),
        caption=f"How many of ours have a cosine in each of {BINS} equal steps from 0 (left) to 1 (right).",
    )


def _counts(entry: Entry) -> Tensor:
    counts = entry.details.get(COSINES) if isinstance(entry, Outcome) else None
    return torch.tensor(counts) if isinstance(counts, list) else torch.zeros(BINS)


RECIPE = Recipe(
    name="cpa-fig-7",
    summary="Cocktail Party Attack, how close VGG-16's recovered features are, by batch size and number of features",
    citation=f"{cpa.CITATION}, figure 7",
    shown=(COSINE, MEDIAN_COSINE, CLOSE),
    run=run,
    notes=(
        cpa.FEATURES,
        "The paper shows distributions without numbers: most cosines are near 1.",
        "Fewer features: the output of the convolutions is averaged to smaller squares before the dense layers.",
        cpa.TUNING,
    ),
)
