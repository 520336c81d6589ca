"""Recovered inputs as pictures."""

from __future__ import annotations

from torch import Tensor

from fedprism.pixels import to_pixels
from fedprism.types import Observation, Reconstruction


def as_pixels(observation: Observation, reconstruction: Reconstruction) -> Tensor:
    """Recovered inputs as pixels in [0, 1], by what is known; an unknown range or scale is stretched to fill it."""
    assert reconstruction.inputs is not None
    knowledge = observation.knowledge
    bounds = None if "scale" in reconstruction.ambiguity else knowledge.bounds
    return to_pixels(reconstruction.tensor, bounds, knowledge.normalization)


def shows_images(reconstruction: Reconstruction) -> bool:
    inputs = reconstruction.inputs
    return isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() == 4 and inputs.shape[1] in (1, 3)
