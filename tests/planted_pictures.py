"""Pictures that are written to files, and whether they came back."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from fedprism.data import ImageSet

NUMBERS = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return NUMBERS.integers(0, 256, shape, dtype=np.uint8)


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def same(found: ImageSet, images: np.ndarray, labels: list[int]) -> bool:
    """Whether a set holds exactly these images, given as (count, height, width[, 3]), and labels."""
    planes = images[:, None] if images.ndim == 3 else np.moveaxis(images, 3, 1)
    return np.array_equal(found.images.numpy(), planes) and found.labels.tolist() == labels
