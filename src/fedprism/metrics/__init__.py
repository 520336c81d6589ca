"""How close a reconstruction comes to its source: functions on two batches of images, one value an image.

All take `(reconstruction, source)`, floating-point tensors (N, C, H, W) with values from 0 to 1 (`mse` and `psnr`: any
(N, ...)), and return (N,). Nothing is clamped here. This package imports nothing of fedprism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .avd import THRESHOLD_LOOSE, THRESHOLD_STRICT, avd, avd_entropy, avd_floor, avd_second_order
from .image import mse, mse_matrix, psnr, ssim
from .lpips import LpipsUnavailable, Net, lpips
from .pairs import paired
from .recovery import RecoveryRate, recovery_rate, wilson

__all__ = [
    "METRICS",
    "THRESHOLD_LOOSE",
    "THRESHOLD_STRICT",
    "LpipsUnavailable",
    "Metric",
    "RecoveryRate",
    "avd",
    "avd_entropy",
    "avd_floor",
    "avd_second_order",
    "lpips",
    "mse",
    "mse_matrix",
    "paired",
    "psnr",
    "recovery_rate",
    "ssim",
    "wilson",
]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A row of the table: the function, which direction is closer to the source, and what it is in a few words."""

    function: Callable[..., Tensor]
    higher_is_better: bool
    images_only: bool
    summary: str


LPIPS_BACKBONES: dict[Net, str] = {"vgg": "VGG-16", "alex": "AlexNet", "squeeze": "SqueezeNet 1.1"}

METRICS: dict[str, Metric] = {
    "mse": Metric(
        function=mse,
        higher_is_better=False,
        images_only=False,
        summary="mean squared error",
    ),
    "psnr": Metric(
        function=psnr,
        higher_is_better=True,
        images_only=False,
        summary="peak signal-to-noise ratio in decibels, data range 1, inf for identical images",
    ),
    "ssim": Metric(
        function=ssim,
        higher_is_better=True,
        images_only=True,
        summary="structural similarity, Gaussian 11 x 11 window, windows inside the image",
    ),
    "avd": Metric(
        function=avd,
        higher_is_better=False,
        images_only=True,
        summary="absolute variation distance of edges, 1 for noise; compare with that of a blank image",
    ),
    "avd-second-order": Metric(
        function=avd_second_order,
        higher_is_better=False,
        images_only=True,
        summary="absolute variation distance with second differences, 1 for noise",
    ),
    "avd-entropy": Metric(
        function=avd_entropy,
        higher_is_better=False,
        images_only=True,
        summary="difference of the entropies of the absolute variation, 0 where it is equally concentrated",
    ),
} | {
    f"lpips-{net}": Metric(
        function=partial(lpips, net=net),
        higher_is_better=False,
        images_only=True,
        summary=f"learned perceptual distance, {backbone} backbone, inputs mapped to [-1, 1]",
    )
    for net, backbone in LPIPS_BACKBONES.items()
}
