"""Whose an unnamed column is, by whatever is known of the users: totals, partial counts, counts under noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

SURE = 0.999
"""Chance from which on a column is said to be a user's."""
POSSIBLE = 1e-3
"""Probability from which on a column is listed as one that may be a user's."""
IMPOSSIBLE = -1e3
"""Log-likelihood of a column that contradicts what is known of a user."""
TIE = 1e-9
"""Log-likelihood by which a column that was found is preferred over one that was not."""
LEAST_RATE = 1e-6
"""Bound on a rate of participation from 0 and from 1, so that its logarithm is finite."""


class Naming(NamedTuple):
    column: Tensor
    """(users,): the column that is likeliest the user's, -1 where none can be."""
    sure: Tensor
    """(users,): whether all other columns, and all that were not found, are far less likely."""
    chance: Tensor
    """(users, columns): how likely each column is the user's."""


def name_columns(agreement: Tensor, of_others: Tensor, *, hidden: int = 0) -> Naming:
    """One column for each user, as far as there are any.

    agreement (users, columns): log-likelihood of what is known of the user if the column is its own; of_others
    (users,): if its column is one that was not found; hidden: how many columns were not found. A column's chance is
    measured by the best of all matchings of users and columns in which it is the user's.
    """
    users, columns = agreement.shape
    size = max(users, columns + max(0, hidden))
    table = torch.zeros(size, size, dtype=torch.float64)  # users who are not counted may have any column
    table[:users, :columns] = agreement.cpu().clamp(min=IMPOSSIBLE)
    table[:users, columns:] = of_others.cpu().clamp(min=IMPOSSIBLE)[:, None]
    liked = table.clone()
    liked[:users, columns:] -= TIE  # of users of whom nothing is known, those there are columns for have one
    column = torch.from_numpy(linear_sum_assignment(liked.numpy(), maximize=True)[1])
    lost = _lost_otherwise(table, column)
    chances = torch.where(table > IMPOSSIBLE / 2, lost.softmax(1), 0.0)
    own = table[torch.arange(size), column]
    column = torch.where((column < columns) & (own > IMPOSSIBLE / 2), column, -1)[:users]
    chance = chances[:users, :columns]
    sure = (column >= 0) & (chance.gather(1, column.clamp(min=0)[:, None])[:, 0] > SURE) if columns else column >= 0
    return Naming(column, sure, chance)


def _lost_otherwise(table: Tensor, column: Tensor) -> Tensor:
    """(size, size): by how much the best matching in which a row has a column is worse than the best of all.

    column (size,) is the best. Others differ from it by cycles in which each row takes the next one's column, so this
    is a question of shortest paths: Floyd, "Algorithm 97: shortest path", 1962.
    """
    matched = table[:, column]
    gain = matched - matched.diagonal()[:, None]
    best = gain.clone()
    for through in range(len(best)):
        best = torch.maximum(best, best[:, through, None] + best[through])
    lost = torch.empty_like(table)
    lost[:, column] = (gain + best.T).clamp(max=0.0)  # row takes another's column, whose row takes ... the first's
    return lost.scatter(1, column[:, None], 0.0)


def log_binomial(counts: Tensor, lengths: Tensor, rate: float) -> Tensor:
    """Log-probability of counts in windows of these lengths by chance, at one rate of participation."""
    rate = min(max(rate, LEAST_RATE), 1 - LEAST_RATE)
    ways = torch.lgamma(lengths + 1) - torch.lgamma(counts + 1) - torch.lgamma(lengths - counts + 1)
    return ways + counts * math.log(rate) + (lengths - counts) * math.log1p(-rate)
