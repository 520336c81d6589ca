"""How close a reconstruction comes to its source: functions of two batches of images in [0, 1], one value per image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from .avd import THRESHOLD_LOOSE, THRESHOLD_STRICT, avd, avd_entropy, avd_floor, avd_second_order
from .image import mse, mse_matrix, psnr, ssim
from .lpips import LpipsUnavailable, Net, lpips
from .pairs import paired
from .recovery import RecoveryRate, recovered_edges, recovered_pixels, recovery_rate, wilson

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
    "recovered_edges",
    "recovered_pixels",
    "recovery_rate",
    "ssim",
    "wilson",
]


class Metric(NamedTuple):
    """A row of the table: the function, what it is in a few words, and which direction is closer to the source."""

    function: Callable[..., Tensor]
    summary: str
    higher_is_better: bool = False
    images_only: bool = True


LPIPS_BACKBONES: dict[Net, str] = {"vgg": "VGG-16", "alex": "AlexNet", "squeeze": "SqueezeNet 1.1"}

METRICS: dict[str, Metric] = {
    "mse": Metric(mse, "mean squared error", images_only=False),
    "psnr": Metric(
        psnr,
        "peak signal-to-noise ratio in decibels, data range 1, inf for identical images",
        higher_is_better=True,
        images_only=False,
    ),
    "ssim": Metric(
        ssim, "structural similarity, Gaussian 11 x 11 window, windows inside the image", higher_is_better=True
    ),
    "avd": Metric(avd, "absolute variation distance of edges, 1 for noise; compare with that of a blank image"),
    "avd-second-order": Metric(avd_second_order, "absolute variation distance with second differences, 1 for noise"),
    "avd-entropy": Metric(
        avd_entropy, "relative entropy of the absolute variations, 0 if all edges are as strong as the source's"
    ),
    "recovered-edges": Metric(
        recovered_edges,
        "1 if the AVD is below 0.6 and below that of a blank image, else 0; the mean is the recovery rate",
        higher_is_better=True,
    ),
    "recovered-pixels": Metric(
        recovered_pixels,
        "1 if the mean squared error is below 0.01 (20 dB), else 0; the mean is the recovery rate",
        higher_is_better=True,
        images_only=False,
    ),
} | {
    f"lpips-{net}": Metric(
        partial(lpips, net=net), f"learned perceptual distance, {backbone} backbone, inputs mapped to [-1, 1]"
    )
    for net, backbone in LPIPS_BACKBONES.items()
}
