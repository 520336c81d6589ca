"""What a recipe is: a paper's table run again, row by row, with the paper's numbers beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from fedprism.errors import BadInput

Announce: TypeAlias = Callable[[str], None]
"""Told what is being done, before it is done."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much effort a recipe spends; None means: as the paper did, or as little as `quick` needs."""

    quick: bool = False
    batches: int | None = None
    sizes: tuple[int, ...] | None = None
    iterations: int | None = None
    inverted: int | None = None
    """How many images a batch are rendered from their features."""
    seed: int = 0
    data_dir: Path | None = None
    device: str | None = None
    finished: Path | None = None
    """Where finished trials are kept, so that a run that was stopped goes on."""
    workers: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.batches, self.iterations, self.inverted, self.workers, *(self.sizes or ()))
        if self.sizes == () or any(number is not None and number < 1 for number in numbers):
            raise BadInput(
                f"expected batches, sizes, iterations, inverted and workers of at least 1, found {self.batches}, "
                f"{self.sizes}, {self.iterations}, {self.inverted} and {self.workers}; change the one that is smaller, "
                "or leave it out."
            )

    def sizes_or(self, published: Sequence[int], quick: Sequence[int]) -> tuple[int, ...]:
        return self.sizes or tuple(quick if self.quick else published)

    def batches_or(self, published: int) -> int:
        return self.batches or (1 if self.quick else published)

    def iterations_or(self, published: int, quick: int) -> int:
        return self.iterations or (quick if self.quick else published)

    def inverted_or(self, published: int, quick: int) -> int:
        return self.inverted or (quick if self.quick else published)

    def paper(self, value: float | str | None) -> float | str | None:
        """A number of the paper's, where it belongs: beside the paper's own data and network, not beside quick ones."""
        return None if self.quick else value


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a method made of a cell: for every metric one mean over the images a batch, in the order of the batches."""

    values: Mapping[str, tuple[float, ...]]
    seconds: tuple[float, ...]
    statuses: tuple[str, ...] = ()
    settings: str = ""
    """The method with its hyper-parameters, as Python."""
    details: Mapping[str, object] = field(default_factory=dict)
    pictures: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    """Originals and what came back, pixels in [0, 1] (images, channels, height, width), both in one order."""

    def mean(self, metric: str) -> float:
        """Mean over the batches; NaN where the metric could not be had."""
        values = self.values.get(metric, ())
        return sum(values) / len(values) if values else math.nan

    @property
    def seconds_a_batch(self) -> float:
        return sum(self.seconds) / len(self.seconds) if self.seconds else math.nan


Entry: TypeAlias = "Measured | float | str | None"
"""What stands in a column: what was measured, a number or a word of the paper's, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; without a `picture` (3, height, width), those of all entries stand below it."""

    cell: Mapping[str, str | int | float]
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()
    picture: Tensor | None = field(default=None, compare=False)
    caption: str = ""


def curve(
    rows: Sequence[Row], along: str, column: str, value: Callable[[Measured], float]
) -> list[tuple[float, float]]:
    """The points of a figure: a value of what was measured in one column, along another."""
    measured = ((row.cell[along], row.entries[column]) for row in rows)
    return [(float(x), value(entry)) for x, entry in measured if isinstance(entry, Measured)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table of a paper: `shown` are the metrics in its cells, `figure` draws the finished rows as an SVG picture."""

    name: str
    summary: str
    citation: str
    shown: tuple[str, ...]
    run: Callable[[Settings, Announce], Iterator[Row]]
    figure: Callable[[Sequence[Row]], str] | None = None
    notes: tuple[str, ...] = ()
