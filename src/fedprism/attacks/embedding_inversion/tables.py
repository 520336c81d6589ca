"""Samples of which every entry is a number or looked up in a table of its own: rows of a data table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.embedding_inversion.answer import UNKNOWN, Answer, LookupStatus, rows_in_use
from fedprism.network.lookups import Coded, Lookup
from fedprism.network.operations import Operation
from fedprism.solvers.closed_form.concatenation import Block, solve_concatenation
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


def read_table(observation: Observation, gradient: Update, coded: Coded, lookups: Sequence[Lookup]) -> list[Answer]:
    """The rows of the table, by the dense layer that is fed its columns side by side; else the columns alone."""
    size = observation.knowledge.batch_size
    samples = size if isinstance(size, int) else None
    used = [rows_in_use(observation, gradient, lookup, samples) for lookup in lookups]
    for layer in coded.network.layers:
        if layer.weight in gradient and layer.bias in gradient:
            answers = _read_layer(observation, gradient, coded, lookups, used, layer, samples)
            if answers:
                return answers
    return [_columns_alone(coded, lookups, used, samples)]


def _read_layer(
    observation: Observation,
    gradient: Update,
    coded: Coded,
    lookups: Sequence[Lookup],
    used: Sequence[Used],
    layer: Operation,
    samples: int | None,
) -> list[Answer]:
    blocks = [_block(observation, layer, lookup, rows) for lookup, rows in zip(lookups, used, strict=True)]
    placed = [block for block in blocks if block is not None]
    if len(placed) < len(blocks):
        return []
    numbers = _numbers(layer, coded.values, lookups, placed)
    whole = torch.cat([gradient[layer.weight], gradient[layer.bias or ""][:, None]], 1)
    tables = (*(lookup.operation.weight for lookup in lookups), layer.weight)
    answers = []
    for choices, fed in solve_concatenation(whole, observation.round.params[layer.weight], placed, samples):
        cells = torch.zeros(len(fed), coded.values.shape[1], dtype=torch.float64)
        for lookup, rows, chosen in zip(lookups, used, choices.T, strict=True):
            cells[:, lookup.entries] = (rows.rows[chosen][:, None] - lookup.offsets).double()
        for number in numbers:
            cells[:, number.entry] = (fed[:, number.column] - number.offset) / number.slope
        answers.append(Answer(cells, LookupStatus.LINKED, frozenset({"order"}), tables))
    return answers


def _block(observation: Observation, layer: Operation, lookup: Lookup, used: Used) -> Block | None:
    """Where the dense layer is fed the rows of a table; None if it is not fed them as they are."""
    fed, rows = layer.inputs.flatten(1).cpu(), lookup.operation.outputs.flatten(1).cpu()
    columns = torch.tensor([_same_column(fed, row) for row in rows.T])
    if bool((columns < 0).any()):
        return None
    table = observation.round.params[lookup.operation.weight]
    return Block(columns, table[used.rows.to(table.device)].detach().cpu().double(), used.gradients)


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


def _columns_alone(coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used], samples: int | None) -> Answer:
    """The categories of every column, without what links them to rows: for one sample that is its row."""
    size = samples or max(len(rows.rows) for rows in used)
    cells = torch.zeros(size, coded.values.shape[1], dtype=torch.float64)
    for lookup, rows in zip(lookups, used, strict=True):
        cells[:, lookup.entries] = UNKNOWN
        cells[: len(rows.rows), lookup.entries] = (rows.rows[:, None] - lookup.offsets).double()
    ambiguity: frozenset[Ambiguity] = frozenset({"order", "samples"} if size > 1 else {"order"})
    tables = tuple(lookup.operation.weight for lookup in lookups)
    return Answer(cells, LookupStatus.COLUMNS, ambiguity, tables)
