"""The patch layer's linear system: solved where it determines the patches, and not answered where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers import PatchStatus, invert_patches


def planted(channels: int, patches: int, features: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Patches, the weight's gradient and the gradient at each patch, in double precision."""
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.rand(patches, features, generator=rng, dtype=torch.float64)
    at_patches = torch.randn(patches, channels, generator=rng, dtype=torch.float64)
    return pixels, at_patches.T @ pixels, at_patches


def solve(weight_grad: Tensor, at_patches: Tensor) -> tuple[Tensor, PatchStatus, Tensor]:
    level = torch.full((len(at_patches), weight_grad.shape[1]), 0.5)
    answer = invert_patches(weight_grad, at_patches, level, 0.3)
    return answer.patches[0] if len(answer.patches) else answer.patches, answer.status, answer.determined


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e9])
def test_patches_come_out_exactly_whatever_the_scale(factor: float) -> None:
    pixels, weight_grad, at_patches = planted(channels=40, patches=30)
    found, status, determined = solve(factor * weight_grad, factor * at_patches)
    assert (found - pixels).abs().max() < 1e-9
    assert status is PatchStatus.SOLVED
    assert bool(determined.all())


def test_a_steep_system_is_not_solved_by_squares() -> None:
    """Singular values over six orders of magnitude: normal equations would leave nothing of the last ones."""
    pixels, _, at_patches = planted(channels=40, patches=20)
    left, _, right = torch.linalg.svd(at_patches, full_matrices=False)
    steep = left * torch.logspace(0, -9, 20, dtype=torch.float64) @ right
    found, status, _ = solve(steep.T @ pixels, steep)
    assert status is PatchStatus.SOLVED
    assert (found - pixels).abs().max() < 1e-4


def test_patches_without_gradient_are_called_open() -> None:
    pixels, weight_grad, at_patches = planted(channels=40, patches=10)
    silent = at_patches.clone()
    silent[3] = 0
    found, status, determined = solve(weight_grad - at_patches[3].outer(pixels[3]), silent)
    others = torch.arange(10) != 3
    assert status is PatchStatus.UNDETERMINED
    assert torch.equal(determined, others)
    assert (found - pixels)[others].abs().max() < 1e-9
    assert torch.allclose(found[3], torch.full((12,), 0.5, dtype=torch.float64)), "nothing is made up for it"


def test_more_patches_than_channels_are_called_open() -> None:
    pixels, weight_grad, at_patches = planted(channels=12, patches=16)
    found, status, determined = solve(weight_grad, at_patches)
    assert status is PatchStatus.UNDETERMINED
    assert not bool(determined.any())
    assert (found - pixels).square().mean() < (0.5 - pixels).square().mean(), "what is determined is used"


def test_noise_is_weighed_against_the_range_of_pixels() -> None:
    pixels, weight_grad, at_patches = planted(channels=40, patches=30)
    rng = torch.Generator().manual_seed(1)
    noisy = weight_grad + 1.0 * torch.randn(weight_grad.shape, generator=rng, dtype=torch.float64)
    found, status, _ = solve(noisy, at_patches)
    plain = torch.linalg.lstsq(at_patches.T, noisy).solution
    assert status is PatchStatus.RESIDUAL
    assert (found - pixels).square().mean() < (plain - pixels).square().mean()


@pytest.mark.parametrize("seed", range(5))
def test_noise_instead_of_gradients_gives_nothing(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    found, status, _ = solve(torch.randn(40, 200, generator=rng), torch.randn(30, 40, generator=rng))
    assert status is PatchStatus.UNRELATED
    assert len(found) == 0


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_zeros_and_infinities_give_nothing(value: float) -> None:
    _, weight_grad, at_patches = planted(channels=40, patches=30)
    for gradients in ((weight_grad, at_patches * value), (weight_grad * value, at_patches)):
        found, status, _ = solve(*gradients)
        assert status is PatchStatus.EMPTY
        assert len(found) == 0
