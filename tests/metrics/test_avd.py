"""The further forms of the absolute variation distance: by hand, against loops, and at their fixed points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.metrics import avd, avd_entropy, avd_floor, avd_second_order
from fedprism.metrics.avd import UNIFORM_NOISE_LOGARITHM

FORMS = [avd, avd_second_order, avd_entropy]


def noise_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(left: Tensor, right: Tensor) -> float:
    """The second-order form of one pair (channels, height, width), place by place."""
    first, second = [], []
    for one, other in zip(left.numpy(), right.numpy(), strict=True):
        dx, dy = ([v[:, :-1] - v[:, 1:] for v in (one, other)], [v[:-1] - v[1:] for v in (one, other)])
        first.append([np.abs(x[1:] + y[:, 1:]) for x, y in zip(dx, dy, strict=True)])
        d2x, d2y = ([x[:, :-1] - x[:, 1:] for x in dx], [y[:-1] - y[1:] for y in dy])
        second.append([np.abs(x[2:] + y[:, 2:]) for x, y in zip(d2x, d2y, strict=True)])
    squares = [np.mean([(a - b) ** 2 for a, b in order]) for order in (first, second)]
    return math.sqrt((squares[0] + 0.5 * squares[1]) / (13 / 12))


def test_second_order_agrees_with_loops() -> None:
    left, right = noise_images(3, 2, 7, 9), noise_images(3, 2, 7, 9, seed=1)
    expected = torch.tensor([by_loops(a, b) for a, b in zip(left, right, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(avd_second_order(left, right), expected)


def test_second_order_sees_a_ramp_only_in_the_first_differences() -> None:
    """A ramp has the same g everywhere, 0.1 down and 0.2 across, and no second differences."""
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    ramp = (0.1 * rows + 0.2 * columns).view(1, 1, 6, 6)
    black = torch.zeros_like(ramp)
    torch.testing.assert_close(avd(ramp, black), torch.tensor([0.3 / math.sqrt(0.5)]))
    torch.testing.assert_close(avd_second_order(ramp, black), torch.tensor([0.3 / math.sqrt(13 / 12)]))


def test_entropy_is_the_logarithm_of_the_ratio_of_edges() -> None:
    """A ramp has the same variation everywhere; twice as steep, every pixel has the same ratio."""
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    ramp = (0.1 * rows + 0.1 * columns).view(1, 1, 6, 6)  # |g| is 0.2 at every place
    expected = math.log(2) / UNIFORM_NOISE_LOGARITHM
    torch.testing.assert_close(avd_entropy(2 * ramp, ramp), torch.tensor([expected]))


def test_a_noisy_copy_is_nearer_than_another_digit() -> None:
    digits = fp.data.load("digits").batch(range(50)).tensor
    noise = torch.randn(digits.shape, generator=torch.Generator().manual_seed(0))
    for form in FORMS:
        assert (form((digits + 0.05 * noise).clamp(0, 1), digits) < form(digits.roll(1, 0), digits)).all()


@pytest.mark.parametrize("form", FORMS)
class TestEveryForm:
    def test_noise_scores_one_against_black_when_measured_by_itself(self, form) -> None:  # type: ignore[no-untyped-def]
        noise = noise_images(3, 3, 32, 32)
        torch.testing.assert_close(form(noise, torch.zeros_like(noise), noise), torch.ones(3, dtype=torch.float64))

    def test_noise_scores_about_one_against_black_without(self, form) -> None:  # type: ignore[no-untyped-def]
        noise = noise_images(3, 3, 128, 128)
        values = form(noise, torch.zeros_like(noise))
        torch.testing.assert_close(values, torch.ones_like(values), atol=0.05, rtol=0)

    def test_a_source_is_at_no_distance_from_itself_and_its_negative(self, form) -> None:  # type: ignore[no-untyped-def]
        source = noise_images(2, 1, 8, 8)
        nothing = torch.zeros(2, dtype=torch.float64)
        torch.testing.assert_close(form(source, source), nothing)
        torch.testing.assert_close(form(1 - source, source), nothing)

    def test_the_floor_is_the_value_of_any_blank_image(self, form) -> None:  # type: ignore[no-untyped-def]
        source, noise = noise_images(2, 1, 8, 8), noise_images(2, 1, 8, 8, seed=1)
        grey = torch.full_like(source, 0.5)
        blank = form(torch.zeros_like(source), source, noise)
        torch.testing.assert_close(form(grey, source, noise), blank)
        assert (blank > 0).all()
        torch.testing.assert_close(avd_floor(source, noise), avd(torch.zeros_like(source), source, noise))

    def test_constant_noise_is_refused(self, form) -> None:  # type: ignore[no-untyped-def]
        source = noise_images(2, 1, 8, 8)
        with pytest.raises(ValueError, match="a constant image"):
            form(source, source, torch.ones_like(source))


def test_small_images_are_refused() -> None:
    tiny = noise_images(1, 1, 2, 2)
    with pytest.raises(ValueError, match="avd_second_order needs images of at least 3 x 3"):
        avd_second_order(tiny, tiny)
