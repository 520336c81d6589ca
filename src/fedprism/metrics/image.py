"""Distances and similarities of pixels: mean squared error, peak signal-to-noise ratio, structural similarity."""

from __future__ import annotations

import torch
from torch import Tensor

from .pairs import chunks, paired, require_size

SSIM_RADIUS = 5
"""In pixels: the Gaussian window of Wang et al. 2004 is 11 x 11."""
SSIM_SIGMA = 1.5
"""In pixels: the standard deviation of that window."""


def mse(reconstruction: Tensor, source: Tensor) -> Tensor:
    """Mean squared error of each pair: (N, ...) and (N, ...) -> (N,). Any shape, not only images."""
    reconstruction, source = paired(reconstruction, source, images=False)
    return (reconstruction - source).square().unsqueeze(-1).flatten(1).mean(1)


def mse_matrix(reconstructions: Tensor, sources: Tensor) -> Tensor:
    """Mean squared errors: (N, ...) and (M, ...) -> (N, M), in double precision, exact to about 1e-15."""
    first, second = reconstructions.double().flatten(1), sources.double().flatten(1)
    # Squares of what differs: taking a common image away first leaves less to cancel.
    middle = second.mean(0, keepdim=True)
    first, second = first - middle, second - middle
    squares = first.square().sum(1)[:, None] + second.square().sum(1)
    return (squares - 2 * first @ second.T).clamp(min=0) / max(1, first.shape[1])


def psnr(reconstruction: Tensor, source: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each pair in decibels, for a data range of 1; inf for identical images."""
    return -10 * mse(reconstruction, source).log10()


def ssim(reconstruction: Tensor, source: Tensor) -> Tensor:
    """Structural similarity of each pair: (N, C, H, W) and (N, C, H, W) -> (N,), at most 1.

    As in Wang et al., "Image quality assessment: from error visibility to structural similarity", 2004, and as
    scikit-image's `structural_similarity` with gaussian_weights=True, sigma=1.5, use_sample_covariance=False. A side
    below 11 pixels gets the largest odd window that fits, and a smaller sigma in proportion (8 x 8: a 7 x 7 window,
    0.9); such values compare with each other only.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure  # slow to import

    reconstruction, source = paired(reconstruction, source, images=True)
    require_size(source, 3, "ssim")
    if len(source) == 0:
        return source.new_zeros(0)
    radius = min(SSIM_RADIUS, (min(source.shape[-2:]) - 1) // 2)
    # torchmetrics derives the window from sigma alone, 2 * int(3.5 * sigma + 0.5) + 1, which is 2 * radius + 1 here.
    sigma = SSIM_SIGMA * radius / SSIM_RADIUS
    values = []
    for ours, theirs in chunks(reconstruction, source):
        # In double precision: single precision errs by 2e-4 to 4e-4 in flat bright regions, differently on every CPU.
        _, windows = structural_similarity_index_measure(
            ours.double(), theirs.double(), sigma=sigma, data_range=1.0, reduction="none", return_full_image=True
        )
        # torchmetrics' own mean also counts windows that stick out over the border, which moves small images by 0.01.
        values.append(windows[..., radius:-radius, radius:-radius].mean((1, 2, 3)))
    return torch.cat(values).to(source.dtype)
