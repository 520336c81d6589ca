"""What reading tables may answer, and how far it can be trusted."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from fedprism.types import Ambiguity

UNKNOWN = -1
"""Stands where no token or category was read."""


class LookupStatus(StrEnum):
    EXACT = "the samples explain the whole update to rounding error"
    PLACED = "every token in its place, by the gradient of the positions"
    COUNTED = "which tokens each sample holds and how often, not in which order"
    SET = "which tokens occur in the batch, not in which sample nor in which place"
    LINKED = "every row of the table, by the dense layer behind it"
    COLUMNS = "which categories occur in each column, not in which row"
    ALL_ROWS = "every row of the table has a gradient: which were used is not told"


class Answer(NamedTuple):
    samples: Tensor
    """(samples, entries of a flattened sample), `UNKNOWN` where nothing was read."""
    status: str
    ambiguity: frozenset[Ambiguity]
    tables: tuple[str, ...]
    """Names of the parameters that were read."""
