"""Tables 2 and 5: images from VGG-16's gradient, or from FedAvg updates of its dense layers, by way of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedprism.attacks import Attack
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import COSINE, VictimBatches
from fedprism_papers.cocktail_party.tables_1_3_and_4 import FEDAVG, TRAINING
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import TableCell, attack_cells
from fedprism_papers.shared.measuring import LPIPS, PSNR
from fedprism_papers.shared.victims import CLIENT_IMAGES, cnn_photos, vgg16_imagenet

BATCHES = {32: 5, 64: 5, 128: 5, 256: 3, 512: 1, 1024: 1}
SIZES, FEDAVG_SIZES, QUICK_SIZES = tuple(BATCHES), (16, 32, 64, 128), (8, 16)
FEDAVG_BATCHES = 5

# LPIPS by batch size, and by the number of images that a client holds.
PAPER: dict[str, tuple[float | str, ...]] = {
    cpa.GMA: (0.536, 0.594, 0.609, 0.652, "out of memory", "out of memory"),
    cpa.PUBLISHED_FIA: (0.483, 0.493, 0.479, 0.495, 0.507, 0.509),
    cpa.OURS_FIA_GMA: (0.392, 0.430, 0.423, 0.469, "out of memory", "out of memory"),
}
FEDAVG_PAPER: dict[str, tuple[float, ...]] = {
    cpa.GMA: (0.598, 0.613, 0.625, 0.639),
    cpa.PUBLISHED_FIA: (0.41, 0.429, 0.431, 0.448),
}

AGGREGATED = (
    f"Batches over {CLIENT_IMAGES} images are the mean of several clients' gradients, as a server sees it under secure "
    "aggregation; it equals the gradient of the whole batch."
)


def gradients(settings: Settings, announce: Announce) -> Iterator[Row]:
    victim = cnn_photos(settings) if settings.quick else vgg16_imagenet(settings)
    attacked = [
        VictimBatches(victim=victim, size=size, batches=settings.batches_or(BATCHES.get(size, 1)))
        for size in settings.sizes_or(SIZES, QUICK_SIZES)
    ]
    yield from _rows(attacked, cpa.on_features(settings), "", (SIZES, PAPER), settings, announce)


def updates(settings: Settings, announce: Announce) -> Iterator[Row]:
    """The convolutions being frozen."""
    victim = cnn_photos(settings, frozen=True) if settings.quick else vgg16_imagenet(settings, frozen=True)
    methods = {name: attack for name, attack in cpa.on_features(settings).items() if name != cpa.OURS_FIA_GMA}
    attacked = [
        VictimBatches(victim=victim, size=size, batches=settings.batches_or(FEDAVG_BATCHES), protocol=FEDAVG)
        for size in settings.sizes_or(FEDAVG_SIZES, QUICK_SIZES)
    ]
    yield from _rows(attacked, methods, "FedAvg, ", (FEDAVG_SIZES, FEDAVG_PAPER), settings, announce)


def _rows(
    attacked: Sequence[VictimBatches],
    methods: Mapping[str, Attack],
    about: str,
    paper: tuple[Sequence[int], Mapping[str, Sequence[float | str]]],
    settings: Settings,
    announce: Announce,
) -> Iterator[Row]:
    """A row for each batch size; `paper`: the sizes that it has, and its numbers for them."""
    # Methods that match a convolutional network's gradient have the first batches of a cell only.
    slow = {} if settings.quick else dict.fromkeys((cpa.GMA, cpa.OURS_FIA_GMA), cpa.MATCHED_BATCHES)
    cells = [TableCell(one, methods, f"{one.victim.name}, {about}{one.size} images", slow) for one in attacked]
    for one, outcomes in zip(attacked, attack_cells(cells, settings, announce), strict=True):
        victim, size, mirrored = one.victim, one.size, one.size - len(one.victim.images)
        extra = [f"n = {size}: {mirrored} of the images are mirror images of others."] if mirrored > 0 else []
        numbers = {name: cpa.by_size(paper[0], known, size) for name, known in paper[1].items()}
        cell: dict[str, str | int] = {"data": victim.name, "n": size, "batches": one.batches}
        yield cpa.row(cell, victim, outcomes, numbers, settings, (cpa.rendered(settings), *extra))


NOTES = (cpa.FEATURES, cpa.SCORED, cpa.BASELINE, cpa.TUNING)
TABLE_2 = Recipe(
    name="cpa-table-2",
    summary="Cocktail Party Attack, VGG-16 on ImageNet, gradients",
    citation=f"{cpa.CITATION}, table 2",
    shown=(LPIPS, PSNR, COSINE),
    run=gradients,
    notes=(AGGREGATED, *NOTES),
)
TABLE_5 = Recipe(
    name="cpa-table-5",
    summary="Cocktail Party Attack, VGG-16 with frozen convolutions on ImageNet, FedAvg updates",
    citation=f"{cpa.CITATION}, table 5",
    shown=(LPIPS, PSNR, COSINE),
    run=updates,
    notes=(TRAINING, "Clients train the dense layers only.", *NOTES),
)
