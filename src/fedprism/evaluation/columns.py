"""Scores for tables: which columns of which private rows came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedprism.data.tabular import Column, places
from fedprism.errors import BadInput
from fedprism.evaluation.scoring import Match
from fedprism.metrics.columns import same_category, within_tolerance

TOLERANCE = 0.05
"""Of a column's range: an age between 18 and 90 may be off by three and a half years."""


@dataclass(frozen=True, kw_only=True)
class TableScores:
    """For every column and private row whether it came back; False where the attack returned nothing for the row."""

    columns: Mapping[str, tuple[bool, ...]]
    tolerance: float

    @property
    def by_column(self) -> dict[str, float]:
        """The share of rows in which each column is right."""
        return {name: sum(right) / len(right) for name, right in self.columns.items()}

    @property
    def by_row(self) -> tuple[float, ...]:
        """The share of columns that are right in each row."""
        return tuple(sum(right) / len(right) for right in zip(*self.columns.values(), strict=True))

    def __str__(self) -> str:
        return "\n".join(f"{name:>16}  {part:.0%} of rows" for name, part in self.by_column.items())


def score_columns(matched: Match, columns: Sequence[Column], tolerance: float = TOLERANCE) -> TableScores:
    """Judge every column of rows that `fedprism.match` has paired: `tolerance` is a share of the column's range."""
    width = sum(column.width for column in columns)
    if matched.truth.dim() != 2 or matched.truth.shape[1] != width:
        raise BadInput(
            f"rows of the table have {width} features, the samples have shape "
            f"{tuple(matched.truth.shape[1:])}. Score with the columns of the same table."
        )
    answered = torch.tensor([row is not None for row in matched.rows])
    right = {}
    for column, place in places(columns).items():
        recovered, truth = matched.recovered[:, place], matched.truth[:, place]
        same = (
            same_category(recovered, truth)
            if column.categories
            else within_tolerance(recovered.flatten(), truth.flatten(), tolerance)
        )
        right[column.name] = tuple((same & answered).tolist())
    return TableScores(columns=right, tolerance=tolerance)
