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
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_chances_are_those_of_all_matchings(seed: int, spread: float) -> None:
    table = spread * torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    named = name_columns(table, torch.full((6,), -50.0, dtype=torch.float64))
    assert float((named.chance - by_enumeration(table)).abs().max()) < 0.12  # belief propagation is near, not exact
    assert bool((named.chance.argmax(1) == by_enumeration(table).argmax(1)).all())


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
    assert not bool(name_columns(agreement, likely).sure[0])
    assert name_columns(agreement, unlikely).sure.tolist() == [True, False]
    assert name_columns(agreement, unlikely).column.tolist() == [0, -1]


def test_counts_by_chance_are_binomial() -> None:
    counts = torch.arange(11, dtype=torch.float64)
    expected = torch.distributions.Binomial(10, torch.tensor(0.3, dtype=torch.float64)).log_prob(counts)
    assert torch.allclose(log_binomial(counts, torch.tensor(10.0), 0.3), expected)
