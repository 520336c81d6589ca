"""Tables as rows that a dense network is fed: numbers scaled to [0, 1], categories as one-hot blocks."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedprism.checks import shown, whole
from fedprism.errors import BadInput
from fedprism.naming import nearest
from fedprism.types import Batch

MOST_ROWS = 2**20
"""Rows of a table: bounds memory."""
MOST_CATEGORIES = 1000
"""A column with more different words than this is text, or a key, not a category."""
MOST_FEATURES = 2**16
"""Numbers and entries of one-hot blocks in a row: bounds memory."""
MOST_CSV_BYTES = 2**28
"""Size of a CSV file: bounds memory."""
MOST_NUMBER = 1e150
"""Beyond this the range of a column may no longer be finite in double precision, which ends at 1.8e308."""


@dataclass(frozen=True)
class Column:
    """One column: a number between `low` and `high`, or one of `categories` where there are any."""

    name: str
    categories: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> int:
        """How many entries of a row it takes."""
        return len(self.categories) or 1


@dataclass(frozen=True, eq=False)
class TableSet:
    """Labelled rows: rows (count, features) float32 in [0, 1], labels (count,) int64."""

    name: str
    rows: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    columns: tuple[Column, ...] = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        """The rows with these indices."""
        chosen = torch.as_tensor(indices)
        return Batch(self.rows[chosen], self.labels[chosen])

    def decoded(self, row: Tensor) -> dict[str, float | str]:
        """A row (features,) as a person reads it: numbers in their own units, categories by name."""
        return {column.name: _decoded(column, row[place]) for column, place in places(self.columns).items()}


def places(columns: Sequence[Column]) -> dict[Column, slice]:
    """Where in a row each column lies."""
    ends = np.cumsum([column.width for column in columns]).tolist()
    return {column: slice(end - column.width, end) for column, end in zip(columns, ends, strict=True)}


def encode(
    name: str, header: Sequence[str], records: Sequence[Sequence[str]], label: str, categorical: Collection[str] = ()
) -> TableSet:
    """A table of texts as rows of numbers. Columns of which every value is a number are numbers, unless named."""
    for word in (label, *categorical):
        if word not in header:
            raise BadInput(f"{name} has no column {shown(word)}; {nearest(word, header)}")
    if len(set(header)) != len(header) or len(header) < 2 or not records:
        raise BadInput(
            f"{name} has {len(header)} columns and {len(records)} rows; it needs two columns with "
            "different names and one row."
        )
    texts = {title: [record[number].strip() for record in records] for number, title in enumerate(header)}
    encoded = [_encoded(name, title, texts[title], title in categorical) for title in header if title != label]
    columns = tuple(column for column, _ in encoded)
    if sum(column.width for column in columns) > MOST_FEATURES:
        raise BadInput(f"{name} has more than {MOST_FEATURES} features. Leave columns out.")
    classes, labels = np.unique(np.array(texts[label]), return_inverse=True)
    return TableSet(
        name=name,
        rows=torch.from_numpy(np.concatenate([block for _, block in encoded], axis=1).astype(np.float32)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        columns=columns,
        class_names=tuple(classes.tolist()),
    )


def read_csv(
    path: str | os.PathLike[str], label: str, categorical: Collection[str] = (), limit: int | None = None
) -> TableSet:
    """A CSV file with a header line; `label` names the column that is learned."""
    name = Path(path).name
    most = MOST_ROWS if limit is None else whole(limit, "limit", MOST_ROWS)
    try:
        if Path(path).stat().st_size > MOST_CSV_BYTES:
            raise ValueError(f"more than {MOST_CSV_BYTES} bytes")
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = [title.strip() for title in next(lines, [])]
            records = [line for line, _ in zip((line for line in lines if line), range(most), strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise BadInput(f"{name} is not a CSV file in UTF-8 ({error}).") from error
    odd = next((number for number, record in enumerate(records, 2) if len(record) != len(header)), None)
    if odd is not None:
        raise BadInput(f"line {odd} of {name} does not have {len(header)} values, as the header does.")
    return encode(name, header, records, label, categorical)


def patients(rows: int = 400) -> TableSet:
    """Made-up patients: six numbers and four categories each, of nobody; the label is whether they come back."""
    rng = np.random.default_rng(20)
    count = whole(rows, "rows", MOST_ROWS)
    age = rng.integers(18, 91, count)
    smoker = rng.choice(["never", "former", "daily"], count, p=[0.55, 0.3, 0.15])
    pressure = np.rint(95 + 0.55 * age + 8 * (smoker == "daily") + rng.normal(0, 9, count))
    weight = np.rint(rng.normal(76, 13, count))
    cholesterol = np.rint(rng.normal(190, 30, count) + 0.3 * age)
    visits = rng.poisson(1 + age / 40, count)
    glucose = np.rint(80 + 0.25 * weight + rng.normal(0, 12, count))
    risk = 0.04 * (age - 55) + 0.9 * (smoker == "daily") + 0.02 * (pressure - 125) + 0.4 * (visits - 2)
    columns: Mapping[str, np.ndarray] = {
        "age": age,
        "sex": rng.choice(["female", "male"], count),
        "region": rng.choice(["north", "east", "south", "west", "abroad"], count),
        "smoker": smoker,
        "insurance": rng.choice(["public", "private", "none"], count, p=[0.7, 0.2, 0.1]),
        "weight": weight,
        "pressure": pressure,
        "cholesterol": cholesterol,
        "glucose": glucose,
        "visits": visits,
        "returned": np.where(risk + rng.logistic(0, 0.5, count) > 0, "yes", "no"),
    }
    records = np.stack([values.astype(str) for values in columns.values()], axis=1).tolist()
    return encode("patients", list(columns), records, "returned")


TABLES: dict[str, Callable[..., TableSet]] = {"patients": patients}


def _encoded(table: str, title: str, texts: Sequence[str], categorical: bool) -> tuple[Column, np.ndarray]:
    """The column and its (count, width) block."""
    numbers = None if categorical else _numbers(texts)
    if numbers is not None:
        low, high = float(numbers.min()), float(numbers.max())
        scaled = (numbers - low) / (high - low) if high > low else np.zeros_like(numbers)
        return Column(title, (), low, high), scaled[:, None]
    words, places_ = np.unique(np.array(texts), return_inverse=True)
    if len(words) > MOST_CATEGORIES:
        raise BadInput(
            f"column {shown(title)} of {table} holds {len(words)} different words; it must hold numbers "
            f"or at most {MOST_CATEGORIES} different words. Fill in missing numbers, or leave the column "
            "out."
        )
    return Column(title, tuple(words.tolist())), np.eye(len(words))[places_]


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return np.array(numbers) if all(math.isfinite(n) and abs(n) < MOST_NUMBER for n in numbers) else None


def _decoded(column: Column, values: Tensor) -> float | str:
    if column.categories:
        return column.categories[int(values.argmax())]
    return column.low + float(values[0]) * (column.high - column.low)
