"""What every metric does first: see that two batches can be compared, and go through large ones in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_PIXELS = 2**17
"""Images times height times width in one piece. With VGG-16, the largest user, a piece takes about 300 MB."""


def paired(reconstruction: Tensor, source: Tensor, *, images: bool) -> tuple[Tensor, Tensor]:
    """Both batches in one floating type of at least single precision, or a ValueError if they cannot be compared."""
    if reconstruction.shape != source.shape:
        raise ValueError(
            f"the reconstruction has shape {tuple(reconstruction.shape)}, the source "
            f"{tuple(source.shape)}. Pair every reconstruction with one source."
        )
    if reconstruction.ndim == 0 or (images and reconstruction.ndim != 4):
        expected = "(images, channels, height, width)" if images else "(images, ...)"
        raise ValueError(f"batches must have shape {expected}, not {tuple(source.shape)}.")
    if not (reconstruction.is_floating_point() and source.is_floating_point()):
        raise ValueError(
            f"values must be floating-point numbers from 0 to 1, not {reconstruction.dtype} and "
            f"{source.dtype}. Divide bytes by 255."
        )
    dtype = torch.promote_types(torch.promote_types(reconstruction.dtype, source.dtype), torch.float32)
    return reconstruction.to(dtype), source.to(dtype)


def require_size(images: Tensor, smallest: int, metric: str) -> None:
    """A ValueError for images (N, C, H, W) with a side below `smallest`."""
    height, width = images.shape[-2:]
    if min(height, width) < smallest:
        raise ValueError(
            f"{metric} needs images of at least {smallest} x {smallest} pixels, found {height} x {width}; "
            "use a metric that does without, such as mse."
        )


def chunks(reconstruction: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of images in order, so many at a time that memory stays bounded; at least one piece, maybe empty."""
    size = max(1, CHUNK_PIXELS // (source.shape[-2] * source.shape[-1]))
    return zip(torch.split(reconstruction, size), torch.split(source, size), strict=True)
