"""Named data sets as tensors: `load("photos")` needs nothing, `load("cifar10", data_dir=...)` the user's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedprism.checks import arguments, row
from fedprism.data.arrays import cifar10_binary, cifar10_pickled, cifar100_binary, cifar100_pickled, idx, npz
from fedprism.data.embedded import digits, photos
from fedprism.data.files import folder, imagenet, imagenet_beside, people, tiny_imagenet, zipped
from fedprism.data.imageset import ImageSet
from fedprism.data.ondisk import OnDisk, Reader
from fedprism.data.source import assemble
from fedprism.data.texts import TextSet, read_texts, text_set

__all__ = ["DATASETS", "ImageSet", "TextSet", "load", "load_folder", "read_texts", "text_set"]

_NUMBERS = tuple(map(str, range(100)))
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

IMAGENET_SIDE = 224
"""In pixels: what networks for ImageNet are usually fed."""


def _files(stem: str, reader: Reader) -> tuple[tuple[str, Reader], ...]:
    """Single files of a data set, the whole one first."""
    ending = "npz" if reader is npz else "zip"
    return (f"{stem}.{ending}", reader), (f"{stem}_*.{ending}", reader)


DATASETS: dict[str, Callable[..., ImageSet]] = {
    "photos": photos,
    "digits": digits,
    "mnist": OnDisk("mnist", (*_files("mnist", npz), ("MNIST/raw", idx)), _NUMBERS[:10]),
    "fashion-mnist": OnDisk("fashion-mnist", (*_files("fashion_mnist", npz), ("FashionMNIST/raw", idx)), _CLOTHES),
    "cifar10": OnDisk(
        "cifar10",
        (*_files("cifar10", npz), ("cifar-10-batches-bin", cifar10_binary), ("cifar-10-batches-py", cifar10_pickled)),
        _THINGS,
    ),
    "cifar100": OnDisk(
        "cifar100",
        (*_files("cifar100", npz), ("cifar-100-binary", cifar100_binary), ("cifar-100-python", cifar100_pickled)),
        _NUMBERS,
    ),
    "tiny-imagenet": OnDisk("tiny-imagenet", (*_files("tiny_imagenet", zipped), ("tiny-imagenet-200", tiny_imagenet))),
    "imagenet": OnDisk(
        "imagenet",
        (*_files("imagenet", zipped), ("imagenet", imagenet), ("train", imagenet_beside), ("val", imagenet_beside)),
        size=IMAGENET_SIDE,
    ),
    "lfw": OnDisk(
        "lfw",
        (*_files("lfw", zipped), *((f"lfw-py/lfw{kind}", people) for kind in ("_funneled", "-deepfunneled", ""))),
        splits=("all",),
    ),
}


def load(name: str, *, data_dir: str | os.PathLike[str] | None = None, **options: Any) -> ImageSet:
    """A data set by its name in DATASETS, or any folder of images as "folder:PATH" or the path of an existing folder.

    Options are the keywords of the data set's function. The data folder is `data_dir`, or FEDPRISM_DATA names it.
    """
    path = _folder_path(name)
    if path is not None:
        return load_folder(**arguments(load_folder, {"path": path, **options}, "a folder of images"))
    loader = row(DATASETS, name, "data set")
    if isinstance(loader, OnDisk):
        options["data_dir"] = data_dir
    return loader(**arguments(loader, options, f"the data set {name}"))


def load_folder(
    path: str | os.PathLike[str], size: int | None = None, limit: int | None = None, channels: int = 3
) -> ImageSet:
    """A folder of class folders, or of images that all get label 0; cut to their central square, resized to `size`."""
    return assemble(f"folder:{Path(path).resolve().name}", folder(Path(path), channels), size, limit)


def _folder_path(name: object) -> Path | None:
    """The folder that a name stands for, if it is not the name of a data set."""
    if not isinstance(name, str) or name in DATASETS:
        return None
    if name.startswith("folder:"):
        return Path(name.removeprefix("folder:"))
    return Path(name) if os.path.isdir(name) else None
