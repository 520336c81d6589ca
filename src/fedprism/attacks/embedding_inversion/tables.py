"""Samples whose numbers and looked-up rows are fed side by side to a dense layer: rows of a data table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.embedding_inversion.answer import UNKNOWN, Answer, LookupStatus
from fedprism.network.lookups import Coded, Lookup
from fedprism.network.operations import Operation
from fedprism.solvers.closed_form.concatenation import Block, Table, solve_concatenation
from fedprism.solvers.closed_form.lookups import Used
from fedprism.types import Ambiguity, Observation, Update

STRAIGHT = 1e-5
"""Largest error, relative to the values, of a straight line from an entry to what the dense layer is fed of it."""


class _Column(NamedTuple):
    """A number that the dense layer is fed: fed = slope * entry + offset."""

    column: int
    entry: int
    slope: float
    offset: float


def read_table(
    observation: Observation, gradient: Update, coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used]
) -> list[Answer]:
    """Every reading of the samples by a dense layer that is fed all that is looked up side by side; often there is one.

    `used`: the rows of each lookup's table.
    """
    for layer in coded.network.layers:
        if layer.weight in gradient and layer.bias is not None and layer.bias in gradient:
            answers = _read_layer(observation, gradient, coded, lookups, used, layer)
            if answers:
                return answers
    return []


def _read_layer(
    observation: Observation,
    gradient: Update,
    coded: Coded,
    lookups: Sequence[Lookup],
    used: Sequence[Used],
    layer: Operation,
) -> list[Answer]:
    blocks = [block for number, lookup in enumerate(lookups) for block in _blocks(layer, lookup, number)]
    if len(blocks) < sum(len(lookup.entries) for lookup in lookups):
        return []
    params, size = observation.round.params, observation.knowledge.batch_size
    tables = [
        Table(params[lookup.operation.weight].detach().cpu().double()[rows.rows], rows.gradients)
        for lookup, rows in zip(lookups, used, strict=True)
    ]
    whole = torch.cat([gradient[layer.weight], gradient[layer.bias or ""][:, None]], 1)
    numbers = _numbers(layer, coded.values, lookups, blocks)
    entries = torch.cat([lookup.entries for lookup in lookups])
    offsets = torch.cat([lookup.offsets for lookup in lookups])
    names = (*(lookup.operation.weight for lookup in lookups), layer.weight)
    answers = []
    for choices, fed in solve_concatenation(whole, params[layer.weight], tables, blocks, _known(size)):
        cells = torch.zeros(len(fed), coded.values.shape[1], dtype=torch.float64)
        rows = [used[block.table].rows[chosen] for block, chosen in zip(blocks, choices.T, strict=True)]
        cells[:, entries] = (torch.stack(rows, 1) - offsets).double()
        for number in numbers:
            cells[:, number.entry] = (fed[:, number.column] - number.offset) / number.slope
        answers.append(Answer(cells, LookupStatus.LINKED, frozenset({"order"}), names))
    return answers


def _known(size: int | tuple[int, ...] | None) -> int | None:
    return size if isinstance(size, int) else None


def _blocks(layer: Operation, lookup: Lookup, number: int) -> list[Block]:
    """Where a dense layer is fed the rows of a table, place by place; empty if it is not fed them as they are."""
    fed, places = layer.inputs.flatten(1).cpu(), len(lookup.entries)
    rows = lookup.operation.outputs.flatten(1).cpu()
    if len(rows) != len(fed) or layer.inputs.dim() != 2 or rows.shape[1] % places:
        return []
    columns = torch.tensor([_same_column(fed, row) for row in rows.T]).view(places, -1)
    return [Block(each, number) for each in columns] if bool((columns >= 0).all()) else []


def _same_column(fed: Tensor, column: Tensor) -> int:
    same = (fed == column[:, None]).all(0).nonzero()
    return int(same[0]) if len(same) else -1


def _numbers(layer: Operation, values: Tensor, lookups: Sequence[Lookup], blocks: Sequence[Block]) -> list[_Column]:
    """The entries that the dense layer is fed as they are, or moved and scaled."""
    fed = layer.inputs.flatten(1).cpu().double()
    looked_up = {int(entry) for lookup in lookups for entry in lookup.entries}
    placed = {int(column) for block in blocks for column in block.columns}
    columns = []
    for column in sorted(set(range(fed.shape[1])) - placed):
        for entry in sorted(set(range(values.shape[1])) - looked_up):
            line = torch.stack([values[:, entry], torch.ones(len(values)).double()], 1)
            slope, offset = torch.linalg.lstsq(line, fed[:, column]).solution.tolist()
            missed = (line @ torch.tensor([slope, offset]).double() - fed[:, column]).abs().max()
            if slope != 0 and bool(missed <= STRAIGHT * fed[:, column].abs().max()):
                columns.append(_Column(column, entry, slope, offset))
                looked_up.add(entry)
                break
    return columns


def columns_alone(observation: Observation, coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used]) -> Answer:
    """The categories of every column, without what links them to rows: for one sample that is its row."""
    size = _known(observation.knowledge.batch_size) or max(len(rows.rows) for rows in used)
    cells = torch.zeros(size, coded.values.shape[1], dtype=torch.float64)
    for lookup, rows in zip(lookups, used, strict=True):
        cells[:, lookup.entries] = UNKNOWN
        cells[: len(rows.rows), lookup.entries] = (rows.rows[:, None] - lookup.offsets).double()
    ambiguity: frozenset[Ambiguity] = frozenset({"order", "samples"} if size > 1 else {"order"})
    tables = tuple(lookup.operation.weight for lookup in lookups)
    return Answer(cells, LookupStatus.COLUMNS, ambiguity, tables)
