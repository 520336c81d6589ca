"""Row spaces with planted vectors: the rank is read off the errors, and only what was fed is inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers.tokens.span import in_span, row_space

WIDTH, FED, WORDS = 40, 12, 300


def planted(rows: int, seed: int = 0, fed: int = FED, range: float = 3.0) -> tuple[Tensor, Tensor]:
    """A dictionary, and the gradient of a matrix that was fed its first vectors, with errors of very different size."""
    rng = torch.Generator().manual_seed(seed)
    words = torch.randn(WORDS, WIDTH, generator=rng)
    errors = torch.randn(fed, rows, generator=rng) * torch.logspace(0, -range, fed)[:, None]
    return words, errors.T @ words[:fed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_what_was_fed_is_inside_and_nothing_else(factor: float, dtype: torch.dtype) -> None:
    words, gradient = planted(60, fed=6, range=1.5)
    space = row_space([(factor * gradient).to(dtype).float()])
    assert space.complete
    assert space.rank == 6
    assert in_span(words, space).inside.nonzero().flatten().tolist() == list(range(6))


def test_gradients_of_very_different_sizes_count_alike() -> None:
    words, first = planted(30)
    space = row_space([first, 1e-5 * planted(30)[1]])
    assert space.rank == FED
    assert in_span(words, space).inside.nonzero().flatten().tolist() == list(range(FED))


def test_more_inputs_than_rows_are_not_called_complete() -> None:
    assert not row_space([planted(8)[1]]).complete
    assert not row_space([planted(100, fed=WIDTH + 5)[1]]).complete


def test_noise_has_no_direction_that_stands_out() -> None:
    noise = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))
    assert row_space([noise]).rank == 0


def test_what_stands_out_of_strong_noise_is_still_found() -> None:
    words, gradient = planted(4000, fed=3)
    rng = torch.Generator().manual_seed(1)
    space = row_space([gradient + 1e-3 * torch.randn(gradient.shape, generator=rng)])
    assert in_span(words, space).inside.nonzero().flatten().tolist() == [0, 1, 2]


def test_zeros_span_nothing_and_are_in_no_span() -> None:
    words, gradient = planted(60)
    assert row_space([torch.zeros(60, WIDTH)]).rank == 0
    assert not bool(in_span(torch.cat([words, torch.zeros(1, WIDTH)]), row_space([gradient])).inside[-1])
