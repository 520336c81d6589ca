"""Readers of files that hold pixels as arrays. Each takes a place and a split, and returns None if it is not there."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
from pathlib import Path

import numpy as np

from fedprism.data.pictures import Pixels
from fedprism.data.safepickle import read_pickle
from fedprism.data.source import DAMAGE, MOST_BYTES, Source, from_arrays
from fedprism.errors import BadInput

_CIFAR_SHAPE = (3, 32, 32)
"""Channels, rows and columns of an image of CIFAR-10 and CIFAR-100."""


def npz(path: Path, split: str) -> Source | None:
    """Arrays x_SPLIT (count, height, width[, channels]), y_SPLIT and, where there, class_names."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MOST_BYTES:
            raise ValueError(f"{unpacked} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            if f"x_{split}" not in arrays:
                return None
            names = np.ravel(arrays["class_names"]).tolist() if "class_names" in arrays else []
            return from_arrays(arrays[f"x_{split}"], arrays[f"y_{split}"], map(str, names), str(path))
    except DAMAGE as error:
        raise BadInput(
            f"{path} does not hold plain arrays x_{split} and y_{split} of at most {MOST_BYTES} bytes "
            f"({error}). Fetch the file again."
        ) from error


def idx(path: Path, split: str) -> Source | None:
    """The idx files of MNIST and Fashion-MNIST, plain or gzipped, under their usual names."""
    prefix = {"train": "train", "test": "t10k"}[split]
    images, labels = path / f"{prefix}-images-idx3-ubyte", path / f"{prefix}-labels-idx1-ubyte"
    if not any(file.exists() for file in (images, _zipped(images))):
        return None
    return from_arrays(_idx_array(images, 3), _idx_array(labels, 1), (), str(path))


def cifar10_binary(path: Path, split: str) -> Source | None:
    """The folder cifar-10-batches-bin."""
    pattern = {"train": "data_batch_*.bin", "test": "test_batch.bin"}[split]
    return _cifar_binary(sorted(path.glob(pattern)), 1, path / "batches.meta.txt")


def cifar100_binary(path: Path, split: str) -> Source | None:
    """The folder cifar-100-binary, fine labels."""
    return _cifar_binary(sorted(path.glob(f"{split}.bin")), 2, path / "fine_label_names.txt")


def cifar10_pickled(path: Path, split: str) -> Source | None:
    """The folder cifar-10-batches-py, which torchvision downloads."""
    pattern = {"train": "data_batch_*", "test": "test_batch"}[split]
    return _cifar_pickled(sorted(path.glob(pattern)), "labels", path / "batches.meta", "label_names")


def cifar100_pickled(path: Path, split: str) -> Source | None:
    """The folder cifar-100-python, which torchvision downloads, fine labels."""
    return _cifar_pickled(sorted(path.glob(split)), "fine_labels", path / "meta", "fine_label_names")


def _zipped(file: Path) -> Path:
    return file.with_name(file.name + ".gz")


def _idx_array(file: Path, dimensions: int) -> Pixels:
    """One idx file: 0, 0, 8 (unsigned bytes), the number of dimensions, a big-endian size for each, the bytes."""
    try:
        with file.open("rb") if file.exists() else gzip.open(_zipped(file)) as stream:
            if stream.read(4) != bytes((0, 0, 8, dimensions)):
                raise ValueError("another kind of file")
            shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
            count = math.prod(shape)
            data = stream.read(min(count, MOST_BYTES) + 1)
        return np.frombuffer(data, dtype=np.uint8).reshape(shape)
    except DAMAGE as error:
        raise BadInput(
            f"{file} is not an idx file of {dimensions}-dimensional bytes ({error}). Fetch it again."
        ) from error


def _cifar_binary(files: list[Path], label_bytes: int, names: Path) -> Source | None:
    """Records of label bytes, the last of which counts, and 3072 pixels."""
    if not files:
        return None
    record = label_bytes + math.prod(_CIFAR_SHAPE)
    for file in files:
        if not 0 < file.stat().st_size <= MOST_BYTES or file.stat().st_size % record:
            raise BadInput(f"{file} has {file.stat().st_size} bytes, not a multiple of {record}. Fetch it again.")
    records = np.concatenate([np.fromfile(file, dtype=np.uint8).reshape(-1, record) for file in files])
    class_names = names.read_text("utf-8").split() if names.exists() else []
    return from_arrays(
        _channels_last(records[:, label_bytes:]), records[:, label_bytes - 1], class_names, str(files[0])
    )


def _cifar_pickled(files: list[Path], labels_key: str, meta: Path, names_key: str) -> Source | None:
    """Pickled dictionaries of data (count, 3072) and a list of labels."""
    if not files:
        return None
    batches = [read_pickle(file) for file in files]
    try:
        images = np.concatenate([_channels_last(batch["data"]) for batch in batches])
        labels = [label for batch in batches for label in batch[labels_key]]
        class_names = read_pickle(meta)[names_key] if meta.exists() else []
        return from_arrays(images, labels, map(str, class_names), str(files[0]))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{files[0].parent} does not hold data and {labels_key} of CIFAR. Fetch it again.") from error


def _channels_last(rows: Pixels) -> Pixels:
    """(count, 3072) rows as (count, 32, 32, 3)."""
    return np.moveaxis(rows.reshape(-1, *_CIFAR_SHAPE), 1, 3)
