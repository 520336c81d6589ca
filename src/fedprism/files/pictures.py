"""Recovered inputs as pictures."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from fedprism.pixels import to_pixels
from fedprism.types import Observation, Reconstruction


def as_pixels(observation: Observation, reconstruction: Reconstruction) -> Tensor:
    """Recovered inputs as pixels in [0, 1], by what is known; an unknown range or scale is stretched to fill it."""
    assert reconstruction.inputs is not None
    knowledge = observation.knowledge
    bounds = None if "scale" in reconstruction.ambiguity else knowledge.bounds
    return to_pixels(reconstruction.tensor, bounds, knowledge.normalization)


def png(pixels: Tensor) -> bytes:
    """An image (1 or 3 channels, height, width) with values in [0, 1] as a PNG file."""
    levels = (pixels.detach().cpu() * 255).round().to(torch.uint8)
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    return file.getvalue()


def shows_images(reconstruction: Reconstruction) -> bool:
    inputs = reconstruction.inputs
    return isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
