"""How many samples are the only one of their class: the paper's number, and what drawn batches have."""

from __future__ import annotations

import pytest
import torch

from fedprism.solvers import expected_singletons


def test_the_number_of_the_paper() -> None:
    assert expected_singletons([1] * 100, 100) == pytest.approx(36.97, abs=0.01)


@pytest.mark.parametrize("shares", [[1.0] * 10, [0.5, 0.2, 0.2, 0.1, 0.0], [7, 2, 1]])
def test_it_is_what_drawn_batches_have(shares: list[float], rng: torch.Generator) -> None:
    drawn = torch.multinomial(torch.tensor(shares, dtype=torch.float64), 8 * 4000, replacement=True, generator=rng)
    single = [(torch.bincount(labels) == 1).sum().item() for labels in drawn.view(4000, 8)]
    assert sum(single) / len(single) == pytest.approx(expected_singletons(shares, 8), abs=0.06)


def test_one_sample_is_alone_and_none_is_none() -> None:
    assert expected_singletons([3, 1], 1) == 1.0
    assert expected_singletons([1.0], 0) == 0.0
    assert expected_singletons([1.0], 2) == 0.0


@pytest.mark.parametrize("wrong", [[], [0.0], [-1.0, 2.0], [[0.5, 0.5]], [float("nan")]])
def test_what_are_no_shares_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="one for each class"):
        expected_singletons(wrong, 3)
