"""Readers of image files: folders, class folders, a zip of JPEGs. Each returns None if the split is not there."""

from __future__ import annotations

import csv
import io
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fedprism.checks import shown, whole
from fedprism.data.pictures import MODES, SUFFIXES, Pixels, decode
from fedprism.data.source import DAMAGE, MOST_CLASSES, Source
from fedprism.errors import BadInput

MOST_MEMBER_BYTES = 2**28
"""What one file inside a zip may unpack to: a small file can claim to hold any amount."""

_VALIDATION = {"train": "train", "test": "val"}
_NAME_COLUMNS = ("words", "identity", "wnid")


def folder(path: Path, channels: int = 3) -> Source:
    """Class folders, numbered in sorted order, or a flat folder of images, which all get label 0."""
    if channels not in tuple(MODES):
        raise BadInput(f"channels must be 1 or 3, not {shown(channels)}.")
    if not os.path.isdir(path):
        raise BadInput(f"{path}: no such folder. Give a folder of images.")
    loose = [file for file in sorted(path.iterdir()) if _is_image(file)]
    groups = {group.name: _images_below(group) for group in sorted(path.iterdir()) if _is_class(group)}
    if loose and any(groups.values()):
        raise BadInput(f"{path} holds both images and class folders. Move one of them away.")
    if not loose and not any(groups.values()):
        raise BadInput(f"{path} holds no {', '.join(sorted(SUFFIXES))} files. Give another folder.")
    if loose:
        groups = {path.resolve().name: loose}
    labels = [label for label, files in enumerate(groups.values()) for _ in files]
    return _from_files([file for files in groups.values() for file in files], labels, groups, channels)


def people(path: Path, split: str) -> Source | None:
    """A folder with one folder a person, as LFW is unpacked; it has no splits."""
    return folder(path)


def imagenet(path: Path, split: str) -> Source | None:
    """The folders train and val, with one folder a class named by its WordNet id."""
    part = path / _VALIDATION[split]
    named = part.is_dir() and [group.name for group in part.iterdir() if _is_class(group)]
    return folder(part) if named and all(re.fullmatch(r"n\d{8}", name) for name in named) else None


def imagenet_beside(path: Path, split: str) -> Source | None:
    """The same where train or val is `path` itself: torchvision puts them straight into the data folder."""
    return imagenet(path.parent, split)


def tiny_imagenet(path: Path, split: str) -> Source | None:
    """The folder tiny-imagenet-200: train has class folders, val one folder of images and a table of their classes."""
    part = path / _VALIDATION[split]
    table = part / "val_annotations.txt"
    if not table.exists():
        return imagenet(path, split)
    rows = [line.split("\t")[:2] for line in table.read_text("utf-8").splitlines() if line.count("\t")]
    listed = path / "wnids.txt"
    classes = sorted(listed.read_text("utf-8").split() if listed.exists() else {wnid for _, wnid in rows})
    numbers = {wnid: number for number, wnid in enumerate(classes)}
    unknown = [wnid for _, wnid in rows if wnid not in numbers]
    if unknown:
        raise BadInput(f"{table} holds the class {unknown[0]}, which is not one of {listed}. Fetch the data set again.")
    return _from_files([part / "images" / name for name, _ in rows], [numbers[wnid] for _, wnid in rows], classes, 3)


def zipped(path: Path, split: str) -> Source | None:
    """A zip of labels.csv (file, label, and a name of the class) and images/FILE; it holds no training split."""
    if split == "train":
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            rows = list(csv.DictReader(io.StringIO(_member(archive, "labels.csv").decode("utf-8"))))
        labels = [whole(int(row["label"]), "each label", MOST_CLASSES - 1, least=0) for row in rows]
        files = [f"images/{row['file']}" for row in rows]
    except (*DAMAGE, csv.Error) as error:
        raise BadInput(
            f"{path} does not hold labels.csv with the columns file and label ({error}). Fetch the file again."
        ) from error
    return Source(np.array(labels, dtype=np.int64), _named(rows, labels), lambda chosen: _unzip(path, files, chosen))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()


def _is_class(group: Path) -> bool:
    return group.is_dir() and not group.name.startswith(".")


def _images_below(group: Path) -> list[Path]:
    return [file for file in sorted(group.rglob("*")) if _is_image(file)]


def _from_files(files: list[Path], labels: list[int], class_names: Iterable[str], channels: int) -> Source:
    def pictures(chosen: Sequence[int]) -> Iterator[Pixels]:
        return (decode(files[index], str(files[index]), channels) for index in chosen)

    return Source(np.array(labels, dtype=np.int64), tuple(class_names), pictures)


def _named(rows: list[dict[str, str]], labels: list[int]) -> tuple[str, ...]:
    """Class names from the first column that has them; a class without an image keeps its number for a name."""
    column = next((column for column in _NAME_COLUMNS if rows and column in rows[0]), "label")
    names = {label: str(row[column]) for label, row in zip(labels, rows, strict=True)}
    return tuple(names.get(number, str(number)) for number in range(max(labels, default=-1) + 1))


def _unzip(path: Path, files: list[str], chosen: Sequence[int]) -> Iterator[Pixels]:
    with zipfile.ZipFile(path) as archive:
        for index in chosen:
            try:
                content = _member(archive, files[index])
            except DAMAGE as error:
                raise BadInput(f"{path} does not hold {files[index]} ({error}). Fetch the file again.") from error
            yield decode(content, f"{path}, {files[index]}")


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of one member, unless it claims to be huge; zipfile never unpacks more than a member claims."""
    claimed = archive.getinfo(name).file_size
    if claimed > MOST_MEMBER_BYTES:
        raise ValueError(f"{name} of {claimed} bytes")
    return archive.read(name)
