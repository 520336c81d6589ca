"""Table 2: images from the gradient of VGG-16, by way of the features that its first dense layer is fed."""

from __future__ import annotations

from collections.abc import Iterator

from fedprism.recipes import cocktail_party as cpa
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.measuring import COSINE, LPIPS, PSNR, Cell
from fedprism.recipes.playing import Game, Played, play_all
from fedprism.recipes.sheets import contact_sheet
from fedprism.recipes.victims import CLIENT_IMAGES, cnn_photos, vgg16_imagenet

BATCHES = {32: 5, 64: 5, 128: 5, 256: 3, 512: 1, 1024: 1}
SIZES, QUICK_SIZES = tuple(BATCHES), (8, 16)

# LPIPS by batch size.
PAPER: dict[str, tuple[float | str, ...]] = {
    cpa.GMA: (0.536, 0.594, 0.609, 0.652, "out of memory", "out of memory"),
    cpa.PUBLISHED_FIA: (0.483, 0.493, 0.479, 0.495, 0.507, 0.509),
    cpa.OURS_FIA_GMA: (0.392, 0.430, 0.423, 0.469, "out of memory", "out of memory"),
}

AGGREGATED = (
    f"Batches over {CLIENT_IMAGES} images are the mean of several clients' gradients, as a server sees it under secure "
    "aggregation; it equals the gradient of the whole batch."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    victim = cnn_photos(settings) if settings.quick else vgg16_imagenet(settings)
    games = [
        Game(
            Cell(victim=victim, size=size, batches=settings.batches_or(BATCHES.get(size, 1))),
            cpa.on_features(settings),
            f"{victim.name}, {size} images",
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
    mirrored = size - len(victim.images)
    extra = [f"n = {size}: {mirrored} of the images are mirror images of others."] if mirrored > 0 else []
    return Row(
        cell={"data": victim.name, "n": size, "batches": cell.batches},
        entries=cpa.beside_paper(
            settings, entries, {name: cpa.by_size(SIZES, numbers, size) for name, numbers in PAPER.items()}
        ),
        notes=(victim.note, cpa.effort(settings), cpa.rendered(settings), *extra, *notes),
        picture=picture,
        caption=caption,
    )


RECIPE = Recipe(
    name="cpa-table-2",
    summary="Cocktail Party Attack, VGG-16 on ImageNet, gradients",
    citation=f"{cpa.CITATION}, table 2",
    shown=(LPIPS, PSNR, COSINE),
    run=run,
    notes=(
        AGGREGATED,
        cpa.FEATURES,
        cpa.SCORED,
        cpa.BASELINE,
        cpa.TUNING,
    ),
)
