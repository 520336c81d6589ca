"""Tables 2 and 5 and figure 7: features of VGG-16 from its gradient or from FedAvg updates, and images from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.client.update import Protocol
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import (
    BINS,
    CLOSE,
    CONFIRMED,
    COSINE,
    COSINES,
    MEDIAN_COSINE,
    VictimBatches,
)
from fedprism_papers.cocktail_party.published_objective import embedding_objective
from fedprism_papers.cocktail_party.tables_1_3_and_4 import FEDAVG, TRAINING
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings
from fedprism_papers.shared.cells import TableCell, attack_cell, attack_cells
from fedprism_papers.shared.measuring import LPIPS, PSNR
from fedprism_papers.shared.sheets import bar_chart, sparkline
from fedprism_papers.shared.victims import (
    CHANNELS,
    CLIENT_IMAGES,
    QUICK_CHANNELS,
    Victim,
    cnn_photos,
    trained_cnn,
    vgg16_imagenet,
)

BATCHES = {32: 5, 64: 5, 128: 5, 256: 3, 512: 1, 1024: 1}
SIZES, FEDAVG_SIZES, QUICK_SIZES = tuple(BATCHES), (16, 32, 64, 128), (8, 16)
FEDAVG_BATCHES = 5  # per cell

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
    sizes = {size: settings.batches_or(BATCHES.get(size, 1)) for size in settings.sizes_or(SIZES, QUICK_SIZES)}
    yield from _rows(sizes, cpa.on_features(settings), fp.FedSGD(), (SIZES, PAPER), settings, announce)


def updates(settings: Settings, announce: Announce) -> Iterator[Row]:
    """The convolutions being frozen."""
    methods = {name: attack for name, attack in cpa.on_features(settings).items() if name != cpa.OURS_FIA_GMA}
    sizes = dict.fromkeys(settings.sizes_or(FEDAVG_SIZES, QUICK_SIZES), settings.batches_or(FEDAVG_BATCHES))
    yield from _rows(sizes, methods, FEDAVG, (FEDAVG_SIZES, FEDAVG_PAPER), settings, announce)


def _rows(
    sizes: Mapping[int, int],
    methods: Mapping[str, Attack],
    protocol: Protocol,
    paper: tuple[Sequence[int], Mapping[str, Sequence[float | str]]],
    settings: Settings,
    announce: Announce,
) -> Iterator[Row]:
    """A row for each batch size with so many batches; `paper`: the sizes that it has, and its numbers for them."""
    data, make = ("photos", cnn_photos) if settings.quick else ("ImageNet", vgg16_imagenet)
    lines: list[dict[str, str | int]] = [
        {"data": data, "n": size, "batches": batches} for size, batches in sizes.items()
    ]
    lines = [cell for cell in lines if settings.wants(cell)]
    if not lines:
        return
    victim = make(settings, frozen=protocol == FEDAVG)
    attacked = [VictimBatches(victim=victim, size=n, batches=sizes[n], protocol=protocol) for n in _sizes(lines)]
    tuned = [cpa.tuned(methods, one, settings, announce) for one in attacked]
    # Methods that match a convolutional network's gradient have the first batches only, unless told otherwise.
    slow = {} if settings.batches else dict.fromkeys((cpa.GMA, cpa.OURS_FIA_GMA), cpa.MATCHED_BATCHES)
    cells = [
        TableCell(one, chosen, f"{data}, {type(protocol).__name__}, {one.size} images", slow)
        for one, (chosen, _) in zip(attacked, tuned, strict=True)
    ]
    each = zip(lines, attacked, tuned, attack_cells(cells, settings, announce), strict=True)
    for cell, one, (chosen, about), outcomes in each:
        mirrored = one.size - len(victim.images)
        extra = [f"n = {one.size}: {mirrored} of the images are mirror images of others."] if mirrored > 0 else []
        extra += (
            [f"{' and '.join(slow)}: {cpa.MATCHED_BATCHES} batch of each cell."] if slow and one.batches > 1 else []
        )
        numbers = {name: cpa.by_size(paper[0], known, one.size) for name, known in paper[1].items()}
        notes = (cpa.rendered(settings), cpa.effort(chosen, rendered=True), *about, *extra)
        yield cpa.row(cell, victim, outcomes, numbers, settings, notes)


def _sizes(lines: Sequence[Mapping[str, str | int]]) -> list[int]:
    return [int(cell["n"]) for cell in lines]


NOTES = (cpa.FEATURES, cpa.SCORED, cpa.BASELINE, cpa.TUNING)
TABLE_2 = Recipe(
    name="cpa-table-2",
    summary="Cocktail Party Attack, VGG-16 on ImageNet, gradients",
    citation=f"{cpa.CITATION}, table 2",
    shown=(LPIPS, PSNR, COSINE),
    run=gradients,
    options=("sizes", "batches", "iterations", "inverted", "tune", "workers", "only"),
    notes=(AGGREGATED, *NOTES),
)
TABLE_5 = Recipe(
    name="cpa-table-5",
    summary="Cocktail Party Attack, VGG-16 with frozen convolutions on ImageNet, FedAvg updates",
    citation=f"{cpa.CITATION}, table 5",
    shown=(LPIPS, PSNR, COSINE),
    run=updates,
    options=TABLE_2.options,
    notes=(TRAINING, "Clients train the dense layers only.", *NOTES),
)

# --- figure 7: how close features come to the true ones, by batch size and number of features -------------------------

POOLS, QUICK_POOLS = (7, 4, 2, 1), (8, 4, 2)  # sides of the maps that features are averaged to
FEWER_SIZES = (32, 128)
"""Batch sizes for networks with fewer features than published."""


def figure_7(settings: Settings, announce: Announce) -> Iterator[Row]:
    data, make, channels = (
        ("photos", cnn_photos, QUICK_CHANNELS) if settings.quick else ("ImageNet", vgg16_imagenet, CHANNELS)
    )
    lines = dict[int, list[dict[str, str | int]]]()
    for place, pool in enumerate(QUICK_POOLS if settings.quick else POOLS):
        for size in settings.sizes_or(FEWER_SIZES if place else SIZES, QUICK_SIZES[place > 0 :]):
            batches, features = settings.batches_or(BATCHES.get(size, 1)), channels * pool**2
            cell: dict[str, str | int] = {"data": data, "features": features, "n": size, "batches": batches}
            if size < features and settings.wants(cell):  # as many images as features cannot be told apart
                lines.setdefault(pool, []).append(cell)
    objective = cpa.objective(settings, embedding_objective())
    methods: dict[str, Attack] = {  # features only: no image is rendered
        cpa.PUBLISHED: cpa.published(objective, images=0),
        cpa.ICA: cpa.ours(exact=False, images=0),
        cpa.OURS: cpa.ours(images=0),
    }
    attacked = [
        VictimBatches(victim=victim, size=int(cell["n"]), batches=int(cell["batches"]))
        for pool, cells in lines.items()
        for victim in (make(settings, pool=pool),)
        for cell in cells
    ]
    table = [TableCell(one, methods, f"{one.victim.features} features, {one.size} images") for one in attacked]
    every = itertools.chain.from_iterable(lines.values())
    for cell, one, (entries, notes) in zip(every, attacked, attack_cells(table, settings, announce), strict=True):
        ours = entries[cpa.OURS]
        counts = torch.tensor(ours.details[COSINES]) if isinstance(ours, Measured) else torch.zeros(BINS)
        yield Row(
            cell=cell,
            entries={**entries, "ours, from 0 to 1": f"[{sparkline(counts)}]"},
            notes=(one.victim.note, cpa.effort(methods), *notes),
            picture=bar_chart(counts),
            caption=f"How many of ours have a cosine in each of {BINS} equal steps from 0 (left) to 1 (right).",
        )


# --- trained convolutional networks with a dense head: how many images are confirmed ----------------------------------

HEADS, QUICK_HEADS = (256, 512, 1024), (256,)  # units of the first dense layer
ACTIVE, QUICK_SHARES = (0.15, 0.4, 0.8), (0.15, 0.8)  # features above zero before training
HEAD_POOLS, QUICK_HEAD_POOLS = (8, 4), (4,)  # sides of the maps that features are averaged to
PUBLIC = 64  # images of the same kind
GRANTED = f"{cpa.OURS}, {PUBLIC} public images"
HEAD_SIZES, HEAD_BATCHES = (16, 32, 64), 3  # images per batch, batches per cell


def dense_heads(settings: Settings, announce: Announce) -> Iterator[Row]:
    pools, heads, shares = (
        (QUICK_HEAD_POOLS, QUICK_HEADS, QUICK_SHARES) if settings.quick else (HEAD_POOLS, HEADS, ACTIVE)
    )
    methods: dict[str, Attack] = {cpa.ICA: cpa.ours(exact=False, images=0), cpa.OURS: cpa.ours(images=0)}
    for pool, width, share in itertools.product(pools, heads, shares):
        first: dict[str, str | int | float] = {"features": QUICK_CHANNELS * pool**2, "units": width, "threshold": share}
        victim: Victim | None = None
        for size in settings.sizes_or(HEAD_SIZES, QUICK_SIZES[:1]):
            if not settings.wants({**first, "n": size}):
                continue
            if victim is None:
                announce(f"{first}: training the network")
                victim = trained_cnn(settings, width=width, active=share, pool=pool)
            attacked = VictimBatches(victim=victim, size=size, batches=settings.batches_or(HEAD_BATCHES))
            fed = victim.embed(attacked.observe(None, 0, settings)[1].tensor, settings.device)
            entries, notes = attack_cell(attacked, methods, settings, announce, f"{first}, {size} images")
            helped = replace(attacked, public=PUBLIC)
            more = attack_cell(helped, {GRANTED: cpa.ours(images=0)}, settings, announce, f"{first}, {size} images")
            measured = {"active features, %": float(100 * (fed > 0).double().mean())}
            yield Row(
                cell={**first, "n": size}, entries={**measured, **entries, **more.entries}, notes=(victim.note, *notes)
            )


DENSE_HEADS = Recipe(
    name="cpa-dense-heads",
    summary="Cocktail Party Attack on trained convolutional networks: images confirmed by width, batch and features",
    citation=f"No table of a paper: our form of {cpa.CITATION} behind trained convolutions",
    shown=(COSINE, CONFIRMED),
    run=dense_heads,
    options=("sizes", "batches", "only"),
    notes=(
        cpa.FEATURES,
        "threshold: features above zero before training; active features: those of the first batch after it.",
    ),
)

FIG_7 = Recipe(
    name="cpa-fig-7",
    summary="Cocktail Party Attack, how close VGG-16's recovered features are, by batch size and number of features",
    citation=f"{cpa.CITATION}, figure 7",
    shown=(COSINE, MEDIAN_COSINE, CLOSE),
    run=figure_7,
    options=("sizes", "batches", "iterations", "workers", "only"),
    notes=(
        cpa.FEATURES,
        "The paper shows distributions without numbers: most cosines are near 1.",
        "Fewer features: the output of the convolutions is averaged to smaller squares before the dense layers.",
        "The published objective has the weights published for VGG-16's features.",
    ),
)
