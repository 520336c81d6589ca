"""Pursuit with planted vectors: found without being told how many there are, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers.tokens.pursuit import PursuitStatus, pursue
from fedprism.solvers.tokens.span import row_space

WIDTH, WORDS = 96, 2000


def planted(rows: int, fed: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    words = torch.randn(WORDS, WIDTH, generator=rng)
    return words, torch.randn(rows, fed, generator=rng) @ words[:fed]


@pytest.mark.parametrize(("rows", "fed"), [(8, 8), (8, 12), (16, 24), (32, 40)])
@pytest.mark.parametrize("seed", [0, 1])
def test_more_vectors_than_rows_are_found(rows: int, fed: int, seed: int) -> None:
    words, gradient = planted(rows, fed, seed)
    found = pursue(row_space([gradient]), words)
    assert found.status is PursuitStatus.PURSUED
    assert sorted(found.chosen.tolist()) == list(range(fed))


def test_fewer_vectors_than_rows_are_told_by_the_span() -> None:
    words, gradient = planted(20, 12)
    found = pursue(row_space([gradient]), words)
    assert found.status is PursuitStatus.SPANNED
    assert found.greedy == 0
    assert sorted(found.chosen.tolist()) == list(range(12))


@pytest.mark.parametrize("fed", [90, 200])
def test_too_many_vectors_are_not_guessed(fed: int) -> None:
    words, gradient = planted(8, fed)
    found = pursue(row_space([gradient]), words)
    assert found.status is PursuitStatus.CROWDED
    assert not len(found.chosen)


def test_vectors_that_are_not_in_the_dictionary_are_not_guessed() -> None:
    words, gradient = planted(8, 10)
    found = pursue(row_space([gradient]), words[5:])
    assert found.status in (PursuitStatus.CROWDED, PursuitStatus.UNEXPLAINED)
    assert not len(found.chosen)


def test_zeros_are_silent() -> None:
    assert pursue(row_space([torch.zeros(8, WIDTH)]), planted(8, 8)[0]).status is PursuitStatus.SILENT
