"""Figure 7: how close recovered features come to the true ones, by batch size and by the number of features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprism.attacks import Attack
from fedprism.recipes import cocktail_party as cpa
from fedprism.recipes.base import Announce, Entry, Outcome, Recipe, Row, Settings
from fedprism.recipes.cpa_table_2 import BATCHES
from fedprism.recipes.measuring import BINS, CLOSE, COSINE, MEDIAN_COSINE, Cell
from fedprism.recipes.playing import Game, Played, play_all
from fedprism.recipes.sheets import bar_chart, sparkline
from fedprism.recipes.victims import cnn_photos, vgg16_imagenet

SIZES, QUICK_SIZES = tuple(BATCHES), (8, 16)
POOLS, QUICK_POOLS = (7, 4, 2, 1), (8, 4, 2)
FEWER_SIZES = (32, 128)
"""Batch sizes for networks with fewer features than published."""


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    make, games = cnn_photos if settings.quick else vgg16_imagenet, list[Game]()
    for number, pool in enumerate(QUICK_POOLS if settings.quick else POOLS):
        victim = make(settings, pool=pool)
        for size in settings.sizes_or(FEWER_SIZES if number else SIZES, QUICK_SIZES[number > 0 :]):
            if size < victim.features:  # as many images as features cannot be told apart
                cell = Cell(victim=victim, size=size, batches=settings.batches_or(BATCHES.get(size, 1)))
                games.append(Game(cell, methods(settings), f"{victim.features} features, {size} images"))
    for game, played in zip(games, play_all(games, settings, announce), strict=True):
        yield row(game.cell, played, settings)


def methods(settings: Settings) -> dict[str, Attack]:
    """Features only: no image is rendered."""
    return {
        cpa.PUBLISHED: cpa.published(cpa.feature_objective(settings), images=0),
        cpa.ICA: cpa.ours(exact=False, images=0),
        cpa.OURS: cpa.ours(images=0),
    }


def row(cell: Cell, played: Played, settings: Settings) -> Row:
    """What was played in a cell, as a line of the table."""
    victim, (entries, notes) = cell.victim, played
    counts = _counts(entries[cpa.OURS])
    return Row(
        cell={"data": victim.name, "features": victim.features, "n": cell.size, "batches": cell.batches},
        entries={**entries, "ours, from 0 to 1": f"[{sparkline(counts)}]"},
        notes=(victim.note, cpa.effort(settings), *notes),
        picture=bar_chart(counts),
        caption=f"How many of ours have a cosine in each of {BINS} equal steps from 0 (left) to 1 (right).",
    )


def _counts(entry: Entry) -> Tensor:
    counts = entry.details.get("cosines from 0 to 1") if isinstance(entry, Outcome) else None
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
