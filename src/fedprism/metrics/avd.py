"""The absolute variation distance: how well the edges of two images agree, whatever their brightness and contrast sign.

Eloul et al., "Enhancing privacy against inversion attacks in federated learning by using mixing gradients strategies",
2022, normalised and of first order; extended in Papadopoulos et al., "Absolute variation distance: an inversion attack
evaluation metric for federated learning", ECIR 2024. For a reconstruction s of a source t, with v an image,

    AVD(s, t) = RMS(|g_s| - |g_t|) / RMS(|g_noise|),    g[r, c] = v[r+1, c] + v[r, c+1] - 2 v[r+1, c+1],

so that the noise an attack starts from scores 1 against a black image. `avd_second_order` adds, with half the weight,
h[r, c] = v[r+2, c] - 2 v[r+2, c+1] + 2 v[r+2, c+2] - 2 v[r+1, c+2] + v[r, c+2]. `avd_entropy` is equation 14 of 2022,
the logarithm of |g_s| / |g_t| at every pixel in place of their difference.

Differs from the papers' code in: nothing is rounded to 8 bits; the caller clamps to [0, 1]; the normaliser is the noise
itself if it is given. Equation 14 gives a value for each pixel and is infinite where an image is flat: ours is the RMS
over pixels, both variations being at least VARIATION_FLOOR. Its factor p0 cancels against the normaliser.

A blank image scores 0.43 on average for MNIST and 0.20 for CIFAR-10, below both thresholds: a value means recovery only
where it is also below `avd_floor`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .pairs import paired, require_size

THRESHOLD_STRICT = 0.6
"""Below it an image counts as recovered, in the strict reading of the 2022 paper."""
THRESHOLD_LOOSE = 0.8
"""The same in the loose reading."""
UNIFORM_NOISE = 0.5**0.5
"""RMS of |g| for independent values uniform on [0, 1]: variance 1/12 times the weights 1 + 1 + 4."""
SECOND_WEIGHT = 0.5
"""How much the mean square of the second differences counts beside that of the first, as in 2024."""
VARIATION_FLOOR = 0.1
"""A smaller |g| counts as this one, in units of the pixel range: with one step of 8 bits in its place, noise of 0.05 on
a flat background weighs as much as the edges of another digit of MNIST."""
UNIFORM_NOISE_LOGARITHM = 1.6998
"""RMS of log(max(|g| / VARIATION_FLOOR, 1)) for independent values uniform on [0, 1], integrated numerically."""
UNIFORM_NOISE_SECOND = (13 / 12) ** 0.5
"""What `avd_second_order` divides by: 1/12 (1 + 1 + 4) + 0.5 * 1/12 (1 + 4 + 4 + 4 + 1), and the root of it."""


def avd(reconstruction: Tensor, source: Tensor, noise: Tensor | None = None) -> Tensor:
    """Absolute variation distance of each pair (N, C, H, W) -> (N,): 0 is perfect, noise about 1.

    `noise` (N, C, H, W) is what each reconstruction started from, uniform on [0, 1] if not given.
    """
    reconstruction, source = paired(reconstruction, source, images=True)
    require_size(source, 2, "avd")
    return _rms(_variation(reconstruction) - _variation(source)) / _scale(
        noise, source, lambda images: _rms(_variation(images)), UNIFORM_NOISE
    )


def avd_second_order(reconstruction: Tensor, source: Tensor, noise: Tensor | None = None) -> Tensor:
    """`avd` in the form of 2024, with second differences beside the first."""
    reconstruction, source = paired(reconstruction, source, images=True)
    require_size(source, 3, "avd_second_order")
    return _both_orders(reconstruction, source) / _scale(
        noise, source, lambda images: _both_orders(images, torch.zeros_like(images)), UNIFORM_NOISE_SECOND
    )


def avd_entropy(reconstruction: Tensor, source: Tensor, noise: Tensor | None = None) -> Tensor:
    """The relative entropy of each pair's variations: 0 if all edges are as strong as the source's, noise about 1."""
    reconstruction, source = paired(reconstruction, source, images=True)
    require_size(source, 2, "avd_entropy")
    return _rms(_log_variation(reconstruction) - _log_variation(source)) / _scale(
        noise, source, lambda images: _rms(_log_variation(images)), UNIFORM_NOISE_LOGARITHM
    )


def avd_floor(source: Tensor, noise: Tensor | None = None) -> Tensor:
    """The AVD of a blank image against each source, (N, C, H, W) -> (N,): what is not below it recovered no edge."""
    return avd(torch.zeros_like(source), source, noise)


def _variation(images: Tensor) -> Tensor:
    """|g|: (N, C, H, W) -> (N, C, H-1, W-1)."""
    return (images[..., 1:, :-1] + images[..., :-1, 1:] - 2 * images[..., 1:, 1:]).abs()


def _second_variation(images: Tensor) -> Tensor:
    """|h|: (N, C, H, W) -> (N, C, H-2, W-2)."""
    across, down = images.diff(n=2, dim=-1), images.diff(n=2, dim=-2)
    return (across[..., 2:, :] + down[..., 2:]).abs()


def _both_orders(left: Tensor, right: Tensor) -> Tensor:
    """The root of the mean square differences of both variations, weighted: (N,)."""
    first, second = _variation(left) - _variation(right), _second_variation(left) - _second_variation(right)
    return (_rms(first).square() + SECOND_WEIGHT * _rms(second).square()).sqrt()


def _log_variation(images: Tensor) -> Tensor:
    """log(max(|g| / floor, 1)): 0 where the image is flat."""
    return (_variation(images) / VARIATION_FLOOR).clamp(min=1).log()


def _scale(noise: Tensor | None, source: Tensor, measure: Callable[[Tensor], Tensor], assumed: float) -> Tensor | float:
    """What the noise of each image measures, (N,); where there is none, what is assumed of it."""
    if noise is None:
        return assumed
    noise, _ = paired(noise, source, images=True)
    scale = measure(noise)
    if not (scale > 0).all():
        raise ValueError("noise is a constant image, with which nothing varies. Leave noise out.")
    return scale


def _rms(values: Tensor) -> Tensor:
    return values.square().mean((1, 2, 3)).sqrt()
