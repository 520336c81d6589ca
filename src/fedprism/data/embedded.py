"""Data sets that need no download and no folder, because scikit-image and scikit-learn carry them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedprism.checks import whole
from fedprism.data.imageset import ImageSet
from fedprism.data.pictures import cropped, decode, fitted
from fedprism.data.source import MOST_SIZE, empty_images
from fedprism.errors import BadInput

# Name of the class -> package and file. Only photographs that show something a person recognises at a glance.
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "pagoda": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}

MOST_CROPS = 1000
"""Crops per photograph: bounds the time."""
LONGEST_SIDE = 768
"""In pixels. Larger photographs are shrunk once to this: cutting hundreds of crops out of them would take seconds."""
PREVIEW = 32
"""Side, in pixels, of the small picture of a crop that its contrast is judged by."""
LEAST_CONTRAST = 25.0
"""Standard deviation of a preview's grey values below which a crop counts as flat."""
GROWTH = 1.2207440846
"""The solution g of g^4 = g + 1."""


def photos(size: int = 32, crops: int = 64) -> ImageSet:
    """Crops of well-known colour photographs; the class says which photograph, and any eight in a row show all."""
    whole(size, "size", MOST_SIZE, least=4)
    whole(crops, "crops", MOST_CROPS)
    classes = len(PHOTOGRAPHS)
    images = empty_images("photos", crops * classes, (3, size, size))
    for label, photograph in enumerate(map(_photograph, PHOTOGRAPHS)):
        for crop, box in enumerate(itertools.islice(_boxes(photograph), crops)):
            images[crop * classes + label] = np.moveaxis(cropped(photograph, box, size), 2, 0)
    return ImageSet("photos", torch.from_numpy(images), torch.arange(classes).repeat(crops), tuple(PHOTOGRAPHS))


def digits(size: int = 8) -> ImageSet:
    """The 1797 handwritten 8x8 digits of scikit-learn (UCI Optical Recognition), enlarged smoothly if asked to."""
    from sklearn.datasets import load_digits  # imported here because scikit-learn's data sets take a second to import

    whole(size, "size", MOST_SIZE)
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = empty_images("digits", len(pixels), (1, size, size))
    for place, image in enumerate(pixels):
        images[place] = fitted(image, size)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return ImageSet("digits", torch.from_numpy(images), labels, tuple(map(str, range(10))))


def _photograph(name: str) -> Image.Image:
    """A photograph out of an installed package. Its file is read directly: skimage.data might start a download."""
    package, path = PHOTOGRAPHS[name]
    # find_spec tells where a package lies without importing it, which takes scikit-learn a second or two.
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if file is None:
        raise BadInput(f"{path}: no such file in the installed {package}. Reinstall {package}.")
    photograph = Image.fromarray(decode(file, path))
    photograph.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return photograph


def _boxes(photograph: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Squares (left, top, right, bottom) with something to see in them: the central one, then ever more of them.

    Position and scale follow the additive recurrence k * (1/g, 1/g^2, 1/g^3) mod 1, which covers the unit cube more
    evenly than random numbers.
    """
    width, height = photograph.size
    short = min(width, height)
    steps = GROWTH ** -np.arange(1.0, 4.0)
    for k in itertools.count():
        across, down, scale = (0.5 + k * steps) % 1
        side = round(short * (0.5 + 0.4 * scale)) if k else short
        left, top = round(across * (width - side)), round(down * (height - side))
        box = (left, top, left + side, top + side)
        if cropped(photograph, box, PREVIEW).mean(axis=2).std() >= LEAST_CONTRAST:
            yield box
