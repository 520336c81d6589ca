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
TIE = 1e-9
"""Log-likelihood by which a column that was found is preferred over one that was not."""
MESSAGES = 100
"""Rounds of belief propagation between users and columns."""
DAMPING = 0.3
"""Weight of an old message against the new one, which keeps ties from swinging."""
CLOSEST = 1e-12
"""Bound on how near a probability may come to one."""


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
    (users,): if its column is one that was not found; hidden: how many columns were not found. Chances are those of a
    random matching, by belief propagation: Huang and Jebara, "Approximating the permanent with belief propagation",
    2009.
    """
    users, columns = agreement.shape
    size = max(users, columns + max(0, hidden))
    table = torch.zeros(size, size, dtype=torch.float64)  # users who are not counted may have any column
    table[:users, :columns] = agreement.cpu().clamp(min=IMPOSSIBLE)
    table[:users, columns:] = of_others.cpu().clamp(min=IMPOSSIBLE)[:, None]
    chances = _matched(table)
    liked = table.clone()
    liked[:users, columns:] -= TIE  # of users of whom nothing is known, those there are columns for have one
    rows, places = (torch.from_numpy(numbers) for numbers in linear_sum_assignment(liked.numpy(), maximize=True))
    column = torch.full((size,), -1, dtype=torch.int64)
    column[rows] = places
    column = column[:users]
    own = table[torch.arange(users), column]
    column = torch.where((column < columns) & (own > IMPOSSIBLE / 2), column, -1)
    chance = torch.where(table > IMPOSSIBLE / 2, chances, 0.0)[:users, :columns]
    sure = (column >= 0) & (chance.gather(1, column.clamp(min=0)[:, None])[:, 0] > SURE) if columns else column >= 0
    return Naming(column, sure, chance)


def _matched(table: Tensor) -> Tensor:
    """(size, size): how likely row and column belong together, if log-likelihoods say how well they fit."""
    from_columns = torch.zeros_like(table)
    for _ in range(MESSAGES):
        fits = table + from_columns
        from_rows = table - _sum_of_others(fits, 1)
        from_columns = DAMPING * from_columns - (1 - DAMPING) * _sum_of_others(from_rows, 0)
    return (table + from_columns).softmax(1)


def _sum_of_others(values: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of the exponentials of all values along a dimension but the one at the place."""
    share = values.log_softmax(dim).clamp(max=-CLOSEST)
    return values.logsumexp(dim, keepdim=True) + torch.log(-torch.expm1(share))


def log_binomial(counts: Tensor, lengths: Tensor, rate: float) -> Tensor:
    """Log-probability of counts in windows of these lengths by chance, at one rate of participation."""
    rate = min(max(rate, 1e-6), 1 - 1e-6)
    ways = torch.lgamma(lengths + 1) - torch.lgamma(counts + 1) - torch.lgamma(lengths - counts + 1)
    return ways + counts * math.log(rate) + (lengths - counts) * math.log1p(-rate)
