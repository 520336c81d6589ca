"""Samples whose numbers and looked-up rows are fed side by side to a dense layer: rows of a data table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.cocktail_party import CocktailParty
from fedprism.attacks.embedding_inversion.answer import UNKNOWN, Answer, LookupStatus
from fedprism.network.entrance import depends_on_running_statistics
from fedprism.network.lookups import Coded, Lookup
from fedprism.network.network_map import NetworkMap
from fedprism.network.operations import Operation
from fedprism.solvers.closed_form.concatenation import Block, Samples, Table, solve_concatenation
from fedprism.solvers.closed_form.lookups import Used
from fedprism.types import Ambiguity, Observation, Update

STRAIGHT = 1e-5
"""Largest error, relative to the values, of a straight line from an entry to what the dense layer is fed of it."""


SAME_ROW = 1e-2
"""Distance from a row, relative to the longest, up to which a separated input is that row."""


class _Column(NamedTuple):
    """A number that the dense layer is fed: fed = slope * entry + offset."""

    column: int
    entry: int
    slope: float
    offset: float


class _Columns(NamedTuple):
    """Where a dense layer is fed what is looked up, and the numbers beside it."""

    layer: Operation
    blocks: list[Block]
    tables: list[Table]
    numbers: list[_Column]


def read_table(
    observation: Observation, gradient: Update, coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used]
) -> list[Answer]:
    """Every reading of the samples by a dense layer that is fed all that is looked up side by side; often there is one.

    `used`: the rows of each lookup's table.
    """
    for layer in coded.network.layers:
        columns = _columns(observation, coded, lookups, used, layer)
        if columns is None or layer.weight not in gradient or layer.bias is None or layer.bias not in gradient:
            continue
        whole = torch.cat([layer.rows(gradient), gradient[layer.bias][:, None]], 1)
        weight, size = layer.rows(observation.round.params), _known(observation.knowledge.batch_size)
        readings = solve_concatenation(whole, weight, columns.tables, columns.blocks, size)
        if not readings:
            readings = _separated(observation, coded.network, columns)
        if readings:
            drifting = depends_on_running_statistics(observation, layer, coded.network.inputs)
            answers = [_answer(coded, lookups, used, columns, reading) for reading in readings]
            return [answer._replace(by_running_statistics=drifting) for answer in answers]
    return []


def fed_side_by_side(coded: Coded, lookups: Sequence[Lookup]) -> list[Operation]:
    """The dense layers with a bias that are fed everything that is looked up."""
    places = sum(len(lookup.entries) for lookup in lookups)
    return [
        layer
        for layer in coded.network.layers
        if places
        and layer.bias is not None
        and sum(len(_blocks(layer, lookup, number)) for number, lookup in enumerate(lookups)) == places
    ]


def _separated(observation: Observation, network: NetworkMap, columns: _Columns) -> list[Samples]:
    """The samples by separating the layer's gradient: also where several hold the same rows of all tables."""
    separation = CocktailParty().separate(observation, observation.round, network, columns.layer, None)
    if not separation.exact:
        return []
    fed, choices = separation.samples.double().cpu(), []
    for block in columns.blocks:
        rows = columns.tables[block.table].rows
        apart = torch.cdist(fed[:, block.columns], rows)
        if bool((apart.amin(1) > SAME_ROW * rows.norm(dim=1).max()).any()):
            return []
        choices.append(apart.argmin(1))
    return [Samples(torch.stack(choices, 1), fed)]


def _columns(
    observation: Observation, coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used], layer: Operation
) -> _Columns | None:
    blocks = [block for number, lookup in enumerate(lookups) for block in _blocks(layer, lookup, number)]
    if len(blocks) < sum(len(lookup.entries) for lookup in lookups):
        return None
    params = observation.round.params
    tables = [
        Table(params[lookup.operation.weight].detach().cpu().double()[rows.rows], rows.gradients)
        for lookup, rows in zip(lookups, used, strict=True)
    ]
    return _Columns(layer, blocks, tables, _numbers(layer, coded.values, lookups, blocks))


def _answer(
    coded: Coded, lookups: Sequence[Lookup], used: Sequence[Used], columns: _Columns, samples: Samples
) -> Answer:
    """The cells that the layer was fed these samples by."""
    cells = torch.zeros(len(samples.inputs), coded.values.shape[1], dtype=torch.float64)
    rows = [used[block.table].rows[chosen] for block, chosen in zip(columns.blocks, samples.choices.T, strict=True)]
    offsets = torch.cat([lookup.offsets for lookup in lookups])
    cells[:, torch.cat([lookup.entries for lookup in lookups])] = (torch.stack(rows, 1) - offsets).double()
    for number in columns.numbers:
        cells[:, number.entry] = (samples.inputs[:, number.column] - number.offset) / number.slope
    names = (*(lookup.operation.weight for lookup in lookups), columns.layer.weight)
    return Answer(cells, LookupStatus.LINKED, frozenset({"order"}), names)


def _known(size: int | tuple[int, ...] | None) -> int | None:
    return size if isinstance(size, int) else None


def _blocks(layer: Operation, lookup: Lookup, number: int) -> list[Block]:
    """Where a dense layer is fed the rows of a table, place by place; empty if it is not fed them as they are."""
    fed, places = layer.inputs.flatten(1).cpu(), len(lookup.entries)
    rows = lookup.operation.outputs.flatten(1).cpu()
    width = lookup.operation.shape[1]
    if len(rows) != len(fed) or layer.inputs.dim() != 2 or rows.shape[1] != places * width:
        return []
    columns = torch.tensor([_same_column(fed, row) for row in rows.T]).view(places, width)
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
