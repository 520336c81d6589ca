"""Table 5: images from federated-averaging updates of VGG-16's dense layers, the convolutions being frozen."""

from __future__ import annotations

from collections.abc import Iterator

from fedprism.recipes import cocktail_party as cpa
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.cpa_table_1 import FEDAVG, TRAINING
from fedprism.recipes.measuring import COSINE, LPIPS, PSNR, Cell
from fedprism.recipes.playing import Game, Played, play_all
from fedprism.recipes.sheets import contact_sheet
from fedprism.recipes.victims import cnn_photos, vgg16_imagenet

SIZES, QUICK_SIZES = (16, 32, 64, 128), (8, 16)
BATCHES = 5

# LPIPS by the number of images a client holds.
PAPER: dict[str, tuple[float, ...]] = {
    cpa.GMA: (0.598, 0.613, 0.625, 0.639),
    cpa.PUBLISHED_FIA: (0.41, 0.429, 0.431, 0.448),
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    victim = cnn_photos(settings, frozen=True) if settings.quick else vgg16_imagenet(settings, frozen=True)
    methods = {name: attack for name, attack in cpa.on_features(settings).items() if name != cpa.OURS_FIA_GMA}
    games = [
        Game(
            Cell(victim=victim, size=size, batches=settings.batches_or(BATCHES), protocol=FEDAVG),
            methods,
            f"{victim.name}, FedAvg, {size} images",
            cpa.fewer(settings),
        )
        for size in settings.sizes_or(SIZES, QUICK_SIZES)
    ]
    for game, played in zip(games, play_all(games, settings, announce), strict=True):
        yield row(game.cell, played, settings)


def row(cell: Cell, played: Played, settings: Settings) -> Row:
    """What was played in a cell, as a line of the table."""
    victim, size, (entries, notes) = cell.victim, cell.size, played
    picture, caption = contact_sheet(entries)
    return Row(
        cell={"data": victim.name, "n": size, "batches": cell.batches},
        entries=cpa.beside_paper(
            settings, entries, {name: cpa.by_size(SIZES, numbers, size) for name, numbers in PAPER.items()}
        ),
        notes=(victim.note, cpa.effort(settings), cpa.rendered(settings), *notes),
        picture=picture,
        caption=caption,
    )


RECIPE = Recipe(
    name="cpa-table-5",
    summary="Cocktail Party Attack, VGG-16 with frozen convolutions on ImageNet, FedAvg updates",
    citation=f"{cpa.CITATION}, table 5",
    shown=(LPIPS, PSNR, COSINE),
    run=run,
    notes=(
        TRAINING,
        "Clients train the dense layers only.",
        cpa.FEATURES,
        cpa.SCORED,
        cpa.BASELINE,
        cpa.TUNING,
    ),
)
