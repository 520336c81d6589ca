"""Model inputs as pixels and back: one conversion for pictures, scores and attacks."""

from __future__ import annotations

import torch
from torch import Tensor

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


def to_pixels(inputs: Tensor, bounds: tuple[float, float] | None, normalization: Normalization | None) -> Tensor:
    """Inputs (batch, ...) as pixels in [0, 1], in double precision on the CPU.

    The normalization (mean, std a channel) is undone and `bounds` becomes [0, 1]; what lies outside is cut off. Without
    bounds each sample is stretched to fill [0, 1]. A value that is not finite is no answer and becomes 0.
    """
    pixels = torch.nan_to_num(inputs.detach().cpu().double(), nan=0.0, posinf=0.0, neginf=0.0)
    if normalization is not None:
        view = (1, -1, *[1] * (pixels.dim() - 2))
        mean, std = (torch.tensor(values, dtype=pixels.dtype).view(view) for values in normalization)
        pixels = pixels * std + mean
    if bounds is None:
        return stretched(pixels)
    low, high = bounds
    return ((pixels - low) / (high - low)).clamp(0, 1)


def to_inputs(pixels: Tensor, normalization: Normalization | None) -> Tensor:
    """Pixels (batch, channels, ...) within the bounds as the model is fed them."""
    if normalization is None:
        return pixels
    mean, std = (pixels.new_tensor(part).view(1, -1, *[1] * (pixels.dim() - 2)) for part in normalization)
    return (pixels - mean) / std


def stretched(samples: Tensor) -> Tensor:
    """Each sample moved and scaled so that its smallest value is 0 and its largest 1."""
    flat = samples.detach().cpu().double().flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=1e-12)).view(samples.shape)
