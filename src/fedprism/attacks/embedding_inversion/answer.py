"""What reading tables may answer, and how far it can be trusted."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from fedprism.errors import NotApplicable
from fedprism.network.lookups import Lookup
from fedprism.solvers.closed_form.lookups import Used, used_rows
from fedprism.types import Ambiguity, Observation, Update

UNKNOWN = -1
"""Stands where no token or category was read."""


class LookupStatus(StrEnum):
    EXACT = "the samples explain the whole update to rounding error"
    PLACED = "every token in its place, by the gradient of the positions"
    COUNTED = "which tokens each sample holds and how often, not in which order"
    SET = "which tokens occur in the batch, not in which sample nor in which place"
    LINKED = "every row of the table, by the dense layer behind it"
    COLUMNS = "which categories occur in each column, not in which row"


class Answer(NamedTuple):
    samples: Tensor
    """(samples, entries of a flattened sample), `UNKNOWN` where nothing was read."""
    status: str
    ambiguity: frozenset[Ambiguity]
    tables: tuple[str, ...]
    """Names of the parameters that were read."""
    by_running_statistics: bool = False
    """Whether numbers were read through batch norm, by statistics that a client in train mode does not use."""


def rows_in_use(observation: Observation, gradient: Update, lookup: Lookup, samples: int | None) -> Used:
    """The rows of a table that so many samples used."""
    table = lookup.operation.weight
    most = None if samples is None else samples * len(lookup.entries)
    difference = observation.round.kind == "delta"
    used = used_rows(gradient[table], observation.round.params[table], most, difference=difference)
    if used is None or not len(used.rows):
        raise NotApplicable(
            f"embedding-inversion needs a gradient in those rows of '{table}' that were used and in no others, but "
            f"{'more have' if used is None else 'none has'} one; use gradient-matching for floating-point inputs."
        )
    return used
