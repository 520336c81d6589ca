"""What the row space of a gradient leaves open, against gradients that are put together by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.solvers.closed_form.row_space import Fed, open_space

UNITS, KERNEL, STRIDE, LENGTH = 20, 6, 2, 20


def windows(length: int = LENGTH, kernel: int = KERNEL, stride: int = STRIDE) -> Tensor:
    return torch.arange(length).unfold(0, kernel, stride)


def fed_by(entries: Tensor) -> Fed:
    return Fed(entries, torch.ones(entries.shape), torch.zeros(entries.shape))


def gradient(sample: Tensor, entries: Tensor, *, with_bias: bool, seed: int = 0) -> Tensor:
    errors = torch.randn(len(entries), UNITS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    patches = sample[entries]
    if with_bias:
        patches = torch.cat([patches, torch.ones(len(entries), 1, dtype=torch.float64)], 1)
    return errors.T @ patches


def test_overlapping_windows_leave_one_sample() -> None:
    sample = torch.randn(LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    entries = windows(kernel=10)
    space = open_space(gradient(sample, entries, with_bias=True), fed_by(entries), LENGTH, with_bias=True, most=6)
    assert space is not None
    assert len(space.directions) == 0
    assert torch.allclose(space.origin, sample, atol=1e-6)


def test_a_single_place_with_a_bias_is_solved_and_without_one_leaves_its_scale() -> None:
    sample, entries = torch.rand(8, dtype=torch.float64), torch.arange(8)[None]
    whole = open_space(gradient(sample, entries, with_bias=True), fed_by(entries), 8, with_bias=True, most=1)
    scaled = open_space(gradient(sample, entries, with_bias=False), fed_by(entries), 8, with_bias=False, most=1)
    assert whole is not None
    assert scaled is not None
    assert torch.allclose(whole.origin, sample, atol=1e-6)
    assert len(scaled.directions) == 1
    assert torch.allclose(torch.nn.functional.normalize(scaled.directions[0], dim=0).abs(), sample / sample.norm())


def test_the_sample_lies_in_what_is_left_open() -> None:
    sample, entries = torch.rand(12, dtype=torch.float64), torch.arange(12).view(3, 4)
    space = open_space(gradient(sample, entries, with_bias=True), fed_by(entries), 12, with_bias=True, most=3)
    assert space is not None
    assert len(space.directions) == 3 * 2
    numbers = torch.linalg.lstsq(space.directions.T, sample - space.origin).solution
    assert torch.allclose(space.origin + numbers @ space.directions, sample, atol=1e-6)


def test_a_gradient_that_spans_everything_excludes_nothing() -> None:
    entries = torch.arange(12).view(6, 2)
    sample = torch.rand(12, dtype=torch.float64)
    assert open_space(gradient(sample, entries, with_bias=False), fed_by(entries), 12, with_bias=False, most=6) is None
