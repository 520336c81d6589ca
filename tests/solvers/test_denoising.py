"""Non-local means: noise planted on photographs, and scikit-image's implementation beside it."""

from __future__ import annotations

import pytest
import torch
from skimage.restoration import denoise_nl_means
from torch import Tensor

import fedprism as fp
from fedprism.solvers.denoising import REACH, STRENGTH, nonlocal_means


@pytest.fixture(scope="module")
def images() -> Tensor:
    return fp.data.load("photos", size=48).draw(8, torch.Generator().manual_seed(0)).inputs.double()


def noisy(images: Tensor, noise: Tensor) -> Tensor:
    drawn = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return images + noise.view(-1, 1, 1, 1) * drawn.to(images)


def level(images: Tensor, noise: float) -> Tensor:
    return images.new_full((len(images),), noise)


def decibels(images: Tensor, truth: Tensor) -> Tensor:
    """Each image's PSNR for pixels from 0 to 1."""
    return -10 * (images - truth).square().flatten(1).mean(1).log10()


def by_skimage(image: Tensor, noise: float) -> Tensor:
    """scikit-image with the same patches of 3 x 3, the same reach and the same decay."""
    pixels = denoise_nl_means(
        image.permute(1, 2, 0).numpy(),
        patch_size=3,
        patch_distance=REACH,
        h=STRENGTH * noise,
        sigma=noise,
        fast_mode=True,
        channel_axis=2,
    )
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.mark.quality
@pytest.mark.parametrize(
    ("noise", "gain", "least"), [(0.02, 0.5, 0.0), (0.05, 2.0, 0.5), (0.1, 4.5, 2.0), (0.2, 7.0, 5.0)]
)
def test_planted_noise_is_taken_out(images: Tensor, noise: float, gain: float, least: float) -> None:
    # The weaker the noise, the more of what looks like it is the photograph's own texture: over 12 batches the mean
    # is 1.0 to 3.7 dB for the weakest and 8.2 to 11.9 dB for the strongest, the worst image's gain 0.3 and 6.3 dB.
    spoiled = noisy(images, level(images, noise))
    gained = decibels(nonlocal_means(spoiled, level(images, noise)), images) - decibels(spoiled, images)
    assert gained.mean() > gain
    assert gained.min() > least


@pytest.mark.quality
@pytest.mark.parametrize(("noise", "gain"), [(0.02, -1.0), (0.05, -1.0), (0.1, 0.0), (0.2, 0.5)])
def test_is_better_than_scikit_image_under_strong_noise(images: Tensor, noise: float, gain: float) -> None:
    # Over 12 batches: -0.6 to 0.0, -0.5 to 0.1, 0.3 to 0.7, and 0.8 to 1.1 dB.
    spoiled = noisy(images, level(images, noise))
    ours = nonlocal_means(spoiled, level(images, noise))
    theirs = torch.stack([by_skimage(image, noise) for image in spoiled])
    assert decibels(ours, images).mean() > decibels(theirs, images).mean() + gain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_images_stay_as_they_are(images: Tensor, dtype: torch.dtype) -> None:
    images = images.to(dtype)
    answer = nonlocal_means(images, level(images, 0.0))
    assert answer.dtype == dtype
    torch.testing.assert_close(answer, images, rtol=0, atol=2e-6)


def test_both_precisions_agree(images: Tensor) -> None:
    spoiled = noisy(images, level(images, 0.05))
    single = nonlocal_means(spoiled.float(), level(spoiled.float(), 0.05))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), nonlocal_means(spoiled, level(images, 0.05)), rtol=0, atol=1e-4)


@pytest.mark.quality
def test_each_image_has_its_own_noise(images: Tensor) -> None:
    noise = torch.tensor([0.0, 0.02, 0.05, 0.1, 0.2, 0.0, 0.1, 0.3], dtype=torch.float64)
    spoiled = noisy(images, noise)
    together = nonlocal_means(spoiled, noise)
    for number in range(len(images)):
        alone = nonlocal_means(spoiled[number : number + 1], noise[number : number + 1])
        torch.testing.assert_close(together[number], alone[0], rtol=0, atol=1e-12)
    assert torch.equal(together[noise == 0], images[noise == 0])
    gained = decibels(together, images) - decibels(spoiled, images)
    assert gained[noise > 0].min() > 0
    # With the levels swapped around, strong noise is taken for texture.
    confused = decibels(nonlocal_means(spoiled, noise.flip(0)), images)
    assert confused[4] < decibels(together, images)[4] - 5


@pytest.mark.parametrize("noise", [0.0, 1e-30, 0.1, 10.0])
@pytest.mark.parametrize("grey", [0.0, 0.4, 1.0])
def test_a_constant_image_stays_constant(grey: float, noise: float) -> None:
    image = torch.full((1, 3, 12, 12), grey)
    torch.testing.assert_close(nonlocal_means(image, torch.tensor([noise])), image, rtol=0, atol=2e-6)


@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("size", [(2, 2), (3, 3), (2, 9), (3, 2)])
def test_tiny_images_keep_their_shape_and_range(size: tuple[int, int], noise: float) -> None:
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    answer = nonlocal_means(images, torch.full((2,), noise))
    assert answer.shape == images.shape
    # An average of pixels lies between them.
    lowest, highest = images.amin((2, 3)), images.amax((2, 3))
    assert (answer.amin((2, 3)) >= lowest - 1e-6).all()
    assert (answer.amax((2, 3)) <= highest + 1e-6).all()
    if noise == 0:
        torch.testing.assert_close(answer, images, rtol=0, atol=1e-6)
    elif noise == 10:  # weaker noise explains no two places of random pixels as alike
        assert not torch.equal(answer, images)


def test_its_arguments_are_not_changed(images: Tensor) -> None:
    noise = level(images, 0.1)
    spoiled = noisy(images, noise)
    before = spoiled.clone(), noise.clone()
    nonlocal_means(spoiled, noise)
    assert torch.equal(spoiled, before[0])
    assert torch.equal(noise, before[1])
