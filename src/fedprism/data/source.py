"""Source: what a reader finds on disk, before any picture is decoded."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedprism.checks import whole
from fedprism.data.imageset import ImageSet
from fedprism.data.pictures import Pixels, fitted
from fedprism.errors import BadInput

MOST_BYTES = 4 * 2**30
"""What one data set may unpack to: a small file can claim to hold any amount."""
MOST_CLASSES = 2**20
"""Bounds the labels that a file may name: each makes a class."""
MOST_SIZE = 4096
"""Longest side, in pixels, that images may be resized to: bounds memory."""

DAMAGE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, RuntimeError),
    *(struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)
"""What reading a damaged or encrypted file raises."""


@dataclass(frozen=True, eq=False)
class Source:
    """All labels at once, pictures on demand: `pictures(indices)` yields (height, width[, 3]) arrays one by one."""

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    pictures: Callable[[Sequence[int]], Iterator[Pixels]]


def from_arrays(images: Pixels, labels: Iterable[int], class_names: Iterable[str], where: str) -> Source:
    """A source of images (count, height, width[, channels]) that are in memory."""
    images, numbers = np.asarray(images), np.asarray(labels)
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    pictured = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if (
        not pictured
        or images.dtype != np.uint8
        or 0 in images.shape[1:]
        or numbers.shape != images.shape[:1]
        or not np.issubdtype(numbers.dtype, np.integer)
    ):
        raise BadInput(
            f"{where} must hold uint8 images (count, height, width[, 3]) and one whole label per image, "
            f"not images {images.dtype} {images.shape} and labels {numbers.dtype} {numbers.shape}. "
            "Convert the file."
        )
    return Source(numbers.astype(np.int64), tuple(class_names), lambda indices: (images[index] for index in indices))


def assemble(name: str, source: Source, size: int | None, limit: int | None) -> ImageSet:
    """Decode a source, or the part of it that `limit` leaves, into an ImageSet of one size."""
    labels, classes = source.labels, len(source.class_names)
    if size is not None:
        whole(size, "size", MOST_SIZE)
    if not len(labels) or labels.min() < 0 or labels.max() >= classes:
        problem = f"labels from {labels.min()} to {labels.max()}" if len(labels) else "no image"
        raise BadInput(f"{name} needs images of {classes} classes, but has {problem}. Check the files.")
    chosen = spread(labels, limit)
    images: Pixels | None = None
    for place, picture in enumerate(source.pictures(chosen.tolist())):
        planes = fitted(picture, size)
        images = empty_images(name, len(chosen), planes.shape) if images is None else images
        if planes.shape != images.shape[1:]:
            raise BadInput(
                f"{name} holds images of different sizes, {images.shape[1:]} and {planes.shape}. Add size=... "
                "to resize them."
            )
        images[place] = planes
    return ImageSet(name, torch.from_numpy(images), torch.from_numpy(labels[chosen]), source.class_names)


def spread(labels: npt.NDArray[np.int64], limit: int | None) -> npt.NDArray[np.intp]:
    """Which images to keep, in file order: the first of every class, then the second, until there are `limit`."""
    if limit is None:
        return np.arange(len(labels))
    by_class = np.argsort(labels, kind="stable")
    ordered = labels[by_class]
    rank = np.empty(len(labels), dtype=np.intp)
    rank[by_class] = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    return np.sort(np.argsort(rank, kind="stable")[: whole(limit, "limit", MOST_BYTES)])


def empty_images(name: str, count: int, shape: tuple[int, ...]) -> Pixels:
    """An array for all images, refused above MOST_BYTES."""
    if count * math.prod(shape) > MOST_BYTES:
        raise BadInput(
            f"{name} has {count} images of {shape}, more than {MOST_BYTES} bytes of pixels. Use limit=... "
            "or a smaller size=...."
        )
    return np.empty((count, *shape), dtype=np.uint8)
