"""Whose column is whose: chances against enumeration of all matchings, and no name without ground."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedprism.solvers.participation.naming import log_binomial, name_columns


def by_enumeration(table: torch.Tensor) -> torch.Tensor:
    size = len(table)
    total, chance = 0.0, torch.zeros_like(table)
    for order in itertools.permutations(range(size)):
        weight = float(torch.exp(sum(table[row, place] for row, place in enumerate(order))))
        total += weight
        for row, place in enumerate(order):
            chance[row, place] += weight
    return chance / total


@pytest.mark.parametrize("seed", range(5))
def test_chances_are_those_of_the_best_matchings(seed: int) -> None:
    table = 4 * torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = torch.full_like(table, -torch.inf)
    for order in itertools.permutations(range(5)):
        weight = sum(table[row, place] for row, place in enumerate(order))
        for row, place in enumerate(order):
            best[row, place] = max(best[row, place], weight)
    named = name_columns(table, torch.full((5,), -50.0, dtype=torch.float64))
    assert torch.allclose(named.chance, best.softmax(1))


@pytest.mark.parametrize("seed", range(20))
def test_a_name_that_is_sure_is_likely_among_all_matchings(seed: int) -> None:
    table = 12 * torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    named = name_columns(table, torch.full((6,), -50.0, dtype=torch.float64))
    chance = by_enumeration(table).gather(1, named.column[:, None])[:, 0]
    assert bool((chance[named.sure] > 0.999).all())


def test_ties_are_not_named_and_each_column_has_one_user() -> None:
    agreement = torch.full((4, 4), -1e3, dtype=torch.float64)
    agreement[0, 0] = agreement[3, 3] = 0
    agreement[1:3, 1:3] = 0
    named = name_columns(agreement, torch.full((4,), -30.0, dtype=torch.float64))
    assert named.sure.tolist() == [True, False, False, True]
    assert sorted(named.column.tolist()) == [0, 1, 2, 3]
    assert torch.allclose(named.chance[1:3, 1:3], torch.full((2, 2), 0.5, dtype=torch.float64), atol=1e-3)


def test_columns_that_were_not_found_keep_names_open() -> None:
    agreement = torch.zeros(2, 1, dtype=torch.float64)
    agreement[1, 0] = -1e3
    likely, unlikely = (torch.full((2,), chance, dtype=torch.float64) for chance in (-1.0, -20.0))
    assert not bool(name_columns(agreement, likely, hidden=2).sure[0])
    assert name_columns(agreement, unlikely, hidden=2).sure.tolist() == [True, False]
    assert name_columns(agreement, unlikely, hidden=2).column.tolist() == [0, -1]


def test_counts_by_chance_are_binomial() -> None:
    counts = torch.arange(11, dtype=torch.float64)
    expected = torch.distributions.Binomial(10, torch.tensor(0.3, dtype=torch.float64)).log_prob(counts)
    assert torch.allclose(log_binomial(counts, torch.tensor(10.0), 0.3), expected)
