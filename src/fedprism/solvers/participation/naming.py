"""Whose an unnamed column is, by whatever is known of the users: totals, partial counts, counts under noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

SURE = 0.999
"""Probability from which on a column is said to be a user's."""
POSSIBLE = 1e-3
"""Probability from which on a column is listed as one that may be a user's."""
IMPOSSIBLE = -1e3
"""Log-likelihood of a column that contradicts what is known of a user."""
SCALINGS = 300
"""How often rows and columns are brought to a sum of one in turn."""


class Naming(NamedTuple):
    column: Tensor
    """(users,): the column that is likeliest the user's, -1 where none can be."""
    sure: Tensor
    """(users,): whether all other columns, and all that were not found, are far less likely."""
    chance: Tensor
    """(users, columns): how likely each column is the user's."""


def name_columns(agreement: Tensor, of_others: Tensor, *, hidden: int = 0) -> Naming:
    """One column for each user, as far as there are any.

    agreement (users, columns): log-likelihood of what is known of the user if the column is its own; of_others (users,):
    if its column is one that was not found; hidden: how many columns were not found. Chances are those of a random matching, to the first order: rows and columns
    of likelihoods are scaled until each sums to one.
    """
    users, columns = agreement.shape
    size = max(users, columns + max(0, hidden))
    table = torch.zeros(size, size, dtype=torch.float64)  # users who are not counted may have any column
    table[:users, :columns] = agreement.cpu().clamp(min=IMPOSSIBLE)
    table[:users, columns:] = of_others.cpu().clamp(min=IMPOSSIBLE)[:, None]
    scaled = table - table.logsumexp(1, keepdim=True)
    for _ in range(SCALINGS):
        scaled = scaled - scaled.logsumexp(0, keepdim=True)
        scaled = scaled - scaled.logsumexp(1, keepdim=True)
    rows, places = (torch.from_numpy(numbers) for numbers in linear_sum_assignment(scaled.numpy(), maximize=True))
    column = torch.full((size,), -1, dtype=torch.int64)
    column[rows] = places
    column = column[:users]
    own = table[torch.arange(users), column]
    column = torch.where((column < columns) & (own > IMPOSSIBLE / 2), column, -1)
    chance = torch.where(table > IMPOSSIBLE / 2, scaled.exp(), 0.0)[:users, :columns]
    sure = (column >= 0) & (chance.gather(1, column.clamp(min=0)[:, None])[:, 0] > SURE) if columns else column >= 0
    return Naming(column, sure, chance)


def log_binomial(counts: Tensor, lengths: Tensor, rate: float) -> Tensor:
    """Log-probability of counts in windows of these lengths by chance, at one rate of participation."""
    rate = min(max(rate, 1e-6), 1 - 1e-6)
    ways = torch.lgamma(lengths + 1) - torch.lgamma(counts + 1) - torch.lgamma(lengths - counts + 1)
    return ways + counts * math.log(rate) + (lengths - counts) * math.log1p(-rate)
