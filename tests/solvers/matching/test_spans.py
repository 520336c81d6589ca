"""Spans of planted gradients: their rank under rounding and noise, and what says nothing; parts of a sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers import SpanStatus, gradient_span, summand


def drawn(seed: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sizes(places: int, decay: float) -> Tensor:
    """What is sent back at each place: ever less, over so many decades."""
    return torch.logspace(0, -decay, places, dtype=torch.float64)[:, None]


def fed_and_gradient(places: int, decay: float = 0.0, rows: int = 60, features: int = 90) -> tuple[Tensor, Tensor]:
    fed = drawn(1, places, features)
    return fed, drawn(2, rows, places) @ (sizes(places, decay) * fed)


def outside(basis: Tensor, fed: Tensor) -> float:
    """The largest share of a place's length that is outside of the span."""
    return float(((fed - fed @ basis.T @ basis).norm(dim=1) / fed.norm(dim=1)).max())


@pytest.mark.parametrize("most", [None, 25, 50])
@pytest.mark.parametrize("places", [1, 8, 25])
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_rounded_gradients_span_what_was_fed(places: int, most: int | None, scale: float) -> None:
    fed, gradient = fed_and_gradient(places, decay=2.0)
    span = gradient_span((scale * gradient).float(), most=most)
    assert span.status is SpanStatus.SPAN
    assert span.rank == places
    assert outside(span.basis, fed) < 1e-4
    torch.testing.assert_close(span.basis @ span.basis.T, torch.eye(places, dtype=torch.float64))


@pytest.mark.parametrize("most", [None, 20])
@pytest.mark.parametrize("noise", [1e-4, 1e-2])
def test_the_rank_ends_at_the_noise(noise: float, most: int | None) -> None:
    fed, gradient = fed_and_gradient(12)
    span = gradient_span(gradient + noise * drawn(3, *gradient.shape), most=most)
    assert span.status is SpanStatus.CUT
    assert span.rank == 12
    assert span.noise == pytest.approx(noise, rel=0.1)
    assert outside(span.basis, fed) < 10 * noise


def test_what_noise_hides_is_cut() -> None:
    _, gradient = fed_and_gradient(12, decay=6.0)
    span = gradient_span(gradient + 1e-3 * drawn(3, *gradient.shape), most=12)
    assert span.status is SpanStatus.CUT
    assert 2 < span.rank < 9


@pytest.mark.parametrize("most", [None, 10])
def test_noise_alone_spans_nothing(most: int | None) -> None:
    span = gradient_span(drawn(4, 60, 90), most=most)
    assert span.status is SpanStatus.NOISE
    assert span.rank == 0
    assert not span.informative


def test_more_places_than_rows_say_nothing() -> None:
    for most, decay in ((None, 0.0), (200, 0.0), (200, 3.0)):
        _, gradient = fed_and_gradient(200, decay)
        assert not gradient_span(gradient.float(), most=most).informative


def test_zeros_span_nothing() -> None:
    span = gradient_span(torch.zeros(5, 7))
    assert span.status is SpanStatus.EMPTY
    assert span.basis.shape == (0, 7)


def test_dead_rows_and_columns_change_nothing() -> None:
    fed, gradient = fed_and_gradient(8)
    wide = torch.zeros(70, 100, dtype=torch.float64)
    wide[5:65, 3:93] = gradient
    span = gradient_span(wide.float())
    assert span.rank == 8
    assert outside(span.basis[:, 3:93], fed) < 1e-4


@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_a_part_of_a_sum_is_told_from_others(factor: float) -> None:
    part, rest = drawn(5, 40, 4) @ drawn(6, 4, 70), drawn(7, 40, 9) @ drawn(8, 9, 70)
    found = summand((factor * part + rest).float(), part.float(), rank=13)
    assert found.factor == pytest.approx(factor, rel=1e-3)
    assert found.error < 1e-3
    changed = part + 0.05 * drawn(9, 40, 4) @ drawn(10, 4, 70)
    assert summand(factor * part + rest, changed, rank=13).error > 0.02
    assert summand(factor * part + rest, drawn(11, 40, 70), rank=13).error > 0.5
