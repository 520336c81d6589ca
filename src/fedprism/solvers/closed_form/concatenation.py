"""The samples behind a dense layer whose inputs are numbers beside rows of known tables.

The rows of the layer's gradient span the samples' inputs. In that space only few points hold a row of every table in
its place: these are the samples, and their numbers come with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.separation.mixture import sent_as

FLOAT32 = torch.finfo(torch.float32).eps
MOST_COMBINATIONS = 200_000
"""Combinations of categories that are kept at most while too few columns are placed to tell the right ones."""
MOST_SUBSETS = 1_000
"""Choices of samples among the points that are compared at most."""
INSIDE_SPAN = 1e-3
"""Distance from the span, relative to the length, up to which a combination lies inside: far above rounding."""
ROUNDED = 8.0
"""The same in units of the precision of a short number format that the gradient was sent in."""


class Table(NamedTuple):
    """Those rows of a table that were used."""

    rows: Tensor
    """(used, width)"""
    gradients: Tensor
    """(used, width) what an update says of them."""


class Block(NamedTuple):
    """Where a row stands in the layer's inputs, and which of the tables it comes from."""

    columns: Tensor
    table: int


class Samples(NamedTuple):
    choices: Tensor
    """(samples, blocks) which of its table's rows stands in each block."""
    inputs: Tensor
    """(samples, features) what the layer was fed."""


def solve_concatenation(
    gradient: Tensor, weight: Tensor, tables: Sequence[Table], blocks: Sequence[Block], samples: int | None = None
) -> list[Samples]:
    """The samples behind the gradient (units, features + 1) of a layer's weight and bias; none where nobody can say.

    Where samples share categories, a sum of two less a third may look like a sample. The gradients of the tables tell
    most of them apart; where they cannot, every reading is returned, for the network itself to decide.
    """
    precision = torch.finfo(sent_as(gradient) or gradient.dtype).eps
    inside = max(INSIDE_SPAN, ROUNDED * precision)
    span = span_of(gradient, samples, precision)
    points = samples_in_span(span, tables, blocks, inside)
    if points is None or len(points.inputs) < len(span) or math.comb(len(points.inputs), len(span)) > MOST_SUBSETS:
        return []
    subsets = itertools.combinations(range(len(points.inputs)), len(span))
    readings = [_chosen(points, list(subset)) for subset in subsets]
    missed = [_missed(reading, gradient, weight, tables, blocks) for reading in readings]
    limit = max(2 * min(missed), (inside * float(gradient.norm())) ** 2)
    return [reading for reading, error in zip(readings, missed, strict=True) if error <= limit]


def _chosen(points: Samples, rows: list[int]) -> Samples:
    return Samples(points.choices[rows], points.inputs[rows])


def _missed(
    samples: Samples, gradient: Tensor, weight: Tensor, tables: Sequence[Table], blocks: Sequence[Block]
) -> float:
    """How far the gradients of the layer and of the tables are from those that these samples give."""
    fed = torch.cat([samples.inputs, torch.ones(len(samples.inputs), 1).to(samples.inputs)], 1)
    errors = torch.linalg.lstsq(fed.T, gradient.double().T).solution  # (samples, units)
    missed = [fed.T @ errors - gradient.double().T]
    expected = [torch.zeros_like(table.gradients, dtype=torch.float64) for table in tables]
    for block, chosen in zip(blocks, samples.choices.T, strict=True):
        expected[block.table].index_add_(0, chosen, errors @ weight[:, block.columns].double())
    missed += [theirs - table.gradients.double() for theirs, table in zip(expected, tables, strict=True)]
    return sum(float(each.square().sum()) for each in missed)


def span_of(gradient: Tensor, samples: int | None = None, precision: float = FLOAT32) -> Tensor:
    """A basis (rank, columns) of the rows of a gradient, above rounding and with at most one row a sample."""
    _, sizes, directions = torch.linalg.svd(gradient.double(), full_matrices=False)
    noise = sizes[0] * precision * max(gradient.shape) ** 0.5
    rank = int((sizes > noise).sum())
    basis: Tensor = directions[: min(rank, samples or rank)]
    return basis


def samples_in_span(
    span: Tensor, tables: Sequence[Table], blocks: Sequence[Block], inside_span: float = INSIDE_SPAN
) -> Samples | None:
    """Every point of the span (rank, features + 1), 1 in its last column, that holds a row of its table in every block.

    None where too many combinations lie in the span: the tables are too narrow to tell the samples apart.
    """
    columns = torch.tensor([span.shape[1] - 1])
    points, choices = torch.ones(1, 1, dtype=span.dtype), torch.empty(1, 0, dtype=torch.long)
    order = sorted(range(len(blocks)), key=lambda number: -len(blocks[number].columns))
    for block in (blocks[number] for number in order):
        rows = tables[block.table].rows.to(points)
        if len(points) * len(rows) > MOST_COMBINATIONS:
            return None
        columns = torch.cat([columns, block.columns])
        points = torch.cat([points.repeat_interleave(len(rows), 0), rows.repeat(len(points), 1)], 1)
        number = torch.arange(len(rows)).repeat(len(choices))
        choices = torch.cat([choices.repeat_interleave(len(rows), 0), number[:, None]], 1)
        inside = _distances(span[:, columns], points, inside_span) <= inside_span * points.norm(dim=1)
        points, choices = points[inside], choices[inside]
    placed = span[:, columns]
    if int(torch.linalg.matrix_rank(placed, rtol=inside_span)) < len(span):
        return None
    inputs = torch.linalg.lstsq(placed.T, points.T).solution.T @ span
    return Samples(choices[:, torch.tensor(order).argsort()], inputs[:, :-1])


def _distances(span: Tensor, points: Tensor, inside_span: float) -> Tensor:
    """How far points lie from the span of the rows."""
    basis = torch.linalg.svd(span, full_matrices=False)
    inside = basis.Vh[inside_span / ROUNDED * basis.S[0] < basis.S]
    distances: Tensor = (points - points @ inside.T @ inside).norm(dim=1)
    return distances
