"""Which entries of the input are looked up in which table: tokens of a text, categories of a table.

The network is run on coded samples: sample k holds bit k of every entry's number. The codes that arrive at a table say
which entries it is asked for, in which order, and what is added to them first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.inputs import unflattened, values_in
from fedprism.network.network_map import NetworkMap, blank_batch, map_of
from fedprism.network.operations import Operation
from fedprism.network.torch_calls import Kind
from fedprism.types import Observation


class Lookup(NamedTuple):
    operation: Operation
    entries: Tensor
    """(places,) which entry of a flattened sample is looked up at each place; entries of several inputs follow on."""
    offsets: Tensor
    """(places,) what is added to an entry to give the row of the table."""


class Coded(NamedTuple):
    """A forward pass of samples whose entries are codes or, where they are not looked up, random numbers."""

    lookups: tuple[Lookup, ...]
    """Every table that entries of the input are looked up in, in the order of execution."""
    network: NetworkMap
    values: Tensor
    """(samples, entries of a flattened sample)"""


def coded_pass(observation: Observation) -> Coded:
    """Find out what is looked up where."""
    codes = _codes(values_in(blank_batch(observation, 1)))
    operations = _map_of_values(observation, codes).operations
    lookups = [_lookup(operation, codes) for operation in operations if operation.kind is Kind.EMBEDDING]
    present = [lookup for lookup in lookups if lookup is not None]
    looked_up = torch.cat([lookup.entries for lookup in present]) if present else torch.empty(0, dtype=torch.long)
    values = torch.rand(codes.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[:, looked_up] = codes[:, looked_up]
    network = _map_of_values(observation, values)
    by_number = {operation.number: operation for operation in network.operations}
    again = tuple(lookup._replace(operation=by_number[lookup.operation.number]) for lookup in present)
    return Coded(again, network, values)


def _codes(entries: int) -> Tensor:
    """(samples, entries) the bits of the numbers 1, 2, ... of all entries, one sample a bit, and their complements."""
    bits = max(1, entries.bit_length())
    ones = (torch.arange(1, entries + 1) >> torch.arange(bits)[:, None]) & 1
    return torch.cat([ones, 1 - ones]).double()


def _map_of_values(observation: Observation, values: Tensor) -> NetworkMap:
    return map_of(observation, unflattened(values, blank_batch(observation, len(values))))


def _lookup(operation: Operation, codes: Tensor) -> Lookup | None:
    """Read the codes; None if what is looked up is not an entry of the input, up to a constant."""
    samples = len(codes)
    for axis in range(min(2, operation.inputs.dim())):
        if operation.inputs.shape[axis] != samples:
            continue
        asked = operation.inputs.movedim(axis, 0).reshape(samples, -1).cpu()
        offsets = asked.amin(0)
        bits, complements = (asked - offsets).chunk(2)
        if not bool((bits + complements == 1).all()):
            continue
        entries = (bits.long() << torch.arange(len(bits))[:, None]).sum(0) - 1
        if bool(((entries >= 0) & (entries < codes.shape[1])).all()):
            return Lookup(operation, entries, offsets)
    return None
