"""Image files to arrays and arrays to the wanted size, both with Pillow."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedprism.errors import BadInput

Pixels = npt.NDArray[np.uint8]

MODES = {1: "L", 3: "RGB"}
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm"})
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
"""Named one by one, because Pillow knows formats that start other programs (EPS calls Ghostscript)."""


def decode(file: Path | bytes, where: str, channels: int = 3) -> Pixels:
    """An image file as (height, width, 3), or (height, width) for one channel. `where` names it in errors."""
    try:
        with warnings.catch_warnings():
            # Pillow only warns about an image that unpacks to 90 million pixels or more; here it is refused.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
                return np.asarray(image.convert(MODES[channels]))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadInput(
            f"{where}: the image has more than {Image.MAX_IMAGE_PIXELS} pixels. Remove it or make it smaller."
        ) from error
    except Exception as error:  # a damaged image raises nearly anything, and each means the same
        raise BadInput(f"{where}: not a readable {', '.join(FORMATS)} image. Remove or replace it.") from error


def fitted(pixels: Pixels, size: int | None) -> Pixels:
    """Pixels (height, width[, 3]) as (channels, height, width): the central square, resized with antialiasing."""
    height, width = pixels.shape[:2]
    if size is not None and (height, width) != (size, size):
        side = min(height, width)
        left, top = (width - side) // 2, (height - side) // 2
        pixels = cropped(Image.fromarray(pixels), (left, top, left + side, top + side), size)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def cropped(image: Image.Image, box: tuple[int, int, int, int], size: int) -> Pixels:
    """The part of an image inside (left, top, right, bottom), resized to a square with antialiasing."""
    # The gap lets Pillow average whole pixels first where it shrinks a lot: several times faster, a grey level apart.
    return np.asarray(image.crop(box).resize((size, size), Image.Resampling.BICUBIC, reducing_gap=3.0))
