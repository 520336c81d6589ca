"""What a recipe is: a paper's table run again, row by row, with the paper's numbers beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from fedprism.errors import BadInput

Announce: TypeAlias = Callable[[str], None]
"""Told what is being done, before it is done."""


EFFORT = ("sizes", "batches", "iterations", "inverted", "encodings", "tune", "workers", "only")
"""Settings that a recipe may have no use for: it names those that it reads."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much effort a recipe spends; None means the recipe's own default, or as little as `quick` needs."""

    quick: bool = False
    batches: int | None = None
    sizes: tuple[int, ...] | None = None
    iterations: int | None = None
    inverted: int | None = None
    """How many images per batch are rendered from their features."""
    tune: int | None = None
    """In how many rehearsals on other images the weights of the baselines are chosen; None: published weights."""
    encodings: int | None = None
    """For how many epochs an attacker on mixed images collects them."""
    only: tuple[str, ...] = ()
    """Rows to compute, as KEY=VALUE of their first columns; all of these must hold."""
    seed: int = 0
    data_dir: Path | None = None
    device: str | None = None
    finished: Path | None = None
    """Where finished trials are kept, so that a run that was stopped goes on."""
    workers: int | None = None
    listing: list[dict[str, str]] | None = field(default=None, compare=False, repr=False)
    """Collects the rows that would be computed; nothing is computed then."""

    def __post_init__(self) -> None:
        for name in ("batches", "sizes", "iterations", "inverted", "encodings", "tune", "workers"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if value == () or any(number < 1 for number in numbers):
                raise BadInput(f"{name} must be at least 1, not {value}. Give a larger number or leave it out.")
        for condition in self.only:
            if "=" not in condition:
                raise BadInput(f"--only takes KEY=VALUE, not '{condition}'. See the rows with --dry-run.")

    def sizes_or(self, published: Sequence[int], quick: Sequence[int]) -> tuple[int, ...]:
        return self.sizes or tuple(quick if self.quick else published)

    def batches_or(self, published: int, quick: int = 1) -> int:
        return self.batches or (quick if self.quick else published)

    def iterations_or(self, published: int, quick: int) -> int:
        return self.iterations or (quick if self.quick else published)

    def inverted_or(self, published: int, quick: int) -> int:
        return self.inverted or (quick if self.quick else published)

    def paper(self, value: float | str | None) -> float | str | None:
        """A number of the paper's, which belongs beside the paper's own data and network, not beside quick ones."""
        return None if self.quick else value

    def chose(self, cell: Mapping[str, str | int | float]) -> bool:
        """Whether `only` leaves a row with these first columns in; columns that are not known yet do not decide."""
        wanted = (condition.split("=", 1) for condition in self.only)
        return all(str(cell[key]) == value for key, value in wanted if key in cell)

    def wants(self, cell: Mapping[str, str | int | float]) -> bool:
        """Whether to compute this row now: asked once for each, before anything is computed for it."""
        if self.listing is None:
            return self.chose(cell)
        if self.chose(cell):
            self.listing.append({key: str(value) for key, value in cell.items()})
        return False

    def wants_any(self, cells: Iterable[Mapping[str, str | int | float]]) -> bool:
        """The same for rows that are computed together."""
        return sum(map(self.wants, cells)) > 0


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
    options: tuple[str, ...] = ("sizes", "batches")
    """The settings out of EFFORT that it reads; any other one is refused."""

    def check(self, settings: Settings) -> None:
        """Refuse settings that would change nothing."""
        for name in EFFORT:
            if getattr(settings, name) and name not in self.options:
                read = ", ".join(f"--{option}" for option in EFFORT if option in self.options) or "no such option"
                raise BadInput(
                    f"--{name} would change nothing, because {self.name} does not read it: it reads {read}. "
                    "Leave it out."
                )
        if settings.listing is not None and "only" not in self.options:
            raise BadInput(f"{self.name} does not list its rows first. Run it without --dry-run.")
