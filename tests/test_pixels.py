"""Pixels to inputs and back."""

from __future__ import annotations

import math

import torch

from fedprism.pixels import stretched, to_inputs, to_pixels

COLOURS = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))


def test_pixels_come_back_from_inputs() -> None:
    pixels = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = to_inputs(pixels, COLOURS)
    torch.testing.assert_close(inputs[:, 2], (pixels[:, 2] - 0.3) / 0.5)
    torch.testing.assert_close(to_pixels(inputs, (0.0, 1.0), COLOURS), pixels)


def test_bounds_become_0_and_1_and_what_is_outside_is_cut_off() -> None:
    inputs = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 2.0, math.nan, math.inf]])
    assert to_pixels(inputs, (-1.0, 1.0), None).tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0, 0.5, 0.5]]


def test_without_bounds_each_sample_is_stretched() -> None:
    samples = torch.tensor([[2.0, 4.0, 3.0], [-1.0, 0.0, 9.0], [7.0, 7.0, 7.0]])
    assert to_pixels(samples, None, None).tolist() == [[0.0, 1.0, 0.5], [0.0, 0.1, 1.0], [0.0, 0.0, 0.0]]
    assert torch.equal(stretched(samples), stretched(10 * samples + 3))
