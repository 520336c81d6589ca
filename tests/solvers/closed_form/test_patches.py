"""The patch layer's linear system: solved where it determines the patches, and not answered where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprism.solvers import PatchStatus, TokensFed, invert_patches, invert_patches_by_attention


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


def attended(*, shift: float, centred: bool, same_places: bool = False) -> tuple[Tensor, tuple[Tensor, ...], TokensFed]:
    """Patches, the gradients of their layer and of the projections behind it, and what stands between."""
    rng = torch.Generator().manual_seed(3)
    patches, features, channels = 10, 30, 40

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    pixels, weight, fixed = drawn(patches, features), drawn(channels, features), drawn(patches, channels)
    fixed = fixed[:1].expand(patches, channels) if same_places else fixed
    gain, offset = 1 + 0.2 * drawn(channels), shift * drawn(channels)
    tokens = pixels @ weight.T + fixed
    tokens = tokens - tokens.mean(1, keepdim=True) if centred else tokens
    fed = gain * tokens / tokens.square().mean(1, keepdim=True).sqrt() + offset
    gradients = drawn(patches, channels).T @ pixels, drawn(patches, 3 * channels).T @ fed
    return pixels, (weight, *gradients), TokensFed(fixed, patches, gain, offset, centred)


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e9])
def test_the_first_attention_opens_the_patches(shift: float, centred: bool, factor: float) -> None:
    pixels, (weight, weight_grad, projections), fed = attended(shift=shift, centred=centred)
    level = torch.zeros_like(pixels)
    answer = invert_patches_by_attention(weight, factor * weight_grad, factor * projections, fed, level, 1.0)
    assert answer.status is PatchStatus.SOLVED
    assert (answer.patches[0] - pixels).abs().max() < 1e-8


def test_patches_at_the_same_place_stay_open() -> None:
    pixels, (weight, weight_grad, projections), fed = attended(shift=0.3, centred=True, same_places=True)
    answer = invert_patches_by_attention(weight, weight_grad, projections, fed, torch.zeros_like(pixels), 1.0)
    assert answer.status is PatchStatus.UNDETERMINED
    assert not bool(answer.determined.any())


def test_projections_of_another_sample_give_nothing() -> None:
    pixels, (weight, weight_grad, projections), fed = attended(shift=0.3, centred=True)
    noise = torch.randn(projections.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    answer = invert_patches_by_attention(weight, weight_grad, noise, fed, torch.zeros_like(pixels), 1.0)
    assert answer.status in (PatchStatus.UNRELATED, PatchStatus.RESIDUAL)
    assert len(answer.patches) == 0 or (answer.patches[0] - pixels).square().mean() > 0.3
