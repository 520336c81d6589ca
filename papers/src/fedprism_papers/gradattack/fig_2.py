"""Figure 2: how often labels repeat in a batch.

Early attacks took every label of a batch to be different, or put images in the order of their labels. Here batches are
drawn as clients draw them, without replacement from shuffled data, and repeats are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedprism.randomness import generator
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings, curve
from fedprism_papers.shared.charts import line_chart

SIZES, QUICK_SIZES = (2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16)  # images per batch
DRAWN, QUICK_DRAWN = 10_000, 1_000
"""How many batches are drawn."""
MANY = 1_000
"""ImageNet's classes."""

REPEATS, SHARING, MISSING = "batches with a repeat", "images that share a class", "classes that are absent"


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = inversion.data_of(settings)
    labels, classes = data.train.labels, int(data.train.labels.max()) + 1
    count = settings.batches_or(DRAWN, QUICK_DRAWN)
    for size in settings.sizes_or(SIZES, QUICK_SIZES):
        cell: dict[str, str | int] = {"data": data.name, "classes": classes, "n": size}
        if not settings.wants(cell):
            continue
        announce(f"{data.name}: {count:,} batches of {size}")
        start = time.perf_counter()
        counts = drawn_counts(labels, classes, size, count, generator(settings.seed, "labels", size))
        yield Row(
            cell=cell,
            entries={
                "drawn": Measured(
                    values={name: (value,) for name, value in repeats(counts).items()},
                    seconds=(time.perf_counter() - start,),
                ),
                f"{REPEATS}, by formula": chance_of_repeat(size, classes),
                f"{REPEATS}, {MANY:,} classes": chance_of_repeat(size, MANY),
            },
            notes=(f"{data.name}: {count:,} batches of each size, out of {len(labels):,} training images.",),
        )


def drawn_counts(labels: Tensor, classes: int, size: int, batches: int, rng: torch.Generator) -> Tensor:
    """(batches, classes): how many images of each class are in each batch, epoch after epoch of shuffled data."""
    whole = len(labels) // size  # what is left over at the end of an epoch is no full batch
    epochs = [
        labels[torch.randperm(len(labels), generator=rng)[: whole * size]].view(whole, size)
        for _ in range(-(-batches // whole))
    ]
    drawn = torch.cat(epochs)[:batches]
    return torch.zeros(len(drawn), classes, dtype=torch.int64).scatter_add_(1, drawn, torch.ones_like(drawn))


def repeats(counts: Tensor) -> dict[str, float]:
    """Fractions: of batches with a class twice, of images that are not alone in their class, of absent classes."""
    shared = torch.where(counts > 1, counts, 0)
    return {
        REPEATS: float((counts > 1).any(1).double().mean()),
        SHARING: float(shared.sum() / counts.sum()),
        MISSING: float((counts == 0).double().mean()),
    }


def chance_of_repeat(size: int, classes: int) -> float:
    """That of `size` labels, each of `classes` with even odds, two are the same: the birthday problem."""
    if size > classes:
        return 1.0
    return -math.expm1(sum(math.log1p(-number / classes) for number in range(size)))


def figure(rows: Sequence[Row]) -> str:
    many = f"{REPEATS}, {MANY:,} classes"
    curves = {
        REPEATS: curve(rows, "n", "drawn", lambda entry: entry.mean(REPEATS)),
        "images sharing": curve(rows, "n", "drawn", lambda entry: entry.mean(SHARING)),
        f"repeat, {MANY:,} classes": [
            (float(row.cell["n"]), chance) for row in rows if isinstance(chance := row.entries[many], float)
        ],
    }
    return line_chart(curves, x="images in a batch", y="fraction", log_x=True)


DRAWING = (
    "Batches are drawn without replacement from shuffled data, as clients draw them; the formula takes classes to be "
    "even and endless."
)
MEANING = (
    "Where labels repeat, they do not tell which answer belongs to which image, and attacks that need every label to "
    "be different do not apply; what an attack makes of such batches is the recipe gradattack-labels."
)

RECIPE = Recipe(
    name="gradattack-fig-2",
    summary="How often labels repeat in a batch",
    citation=f"{inversion.CITATION}, figure 2",
    shown=(REPEATS, SHARING, MISSING),
    run=run,
    options=("sizes", "batches", "only"),
    figure=figure,
    notes=(DRAWING, MEANING),
)
