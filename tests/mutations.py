"""Changes to a capture on disk, out of which hostile ones are put together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from hostility import (
    CLASSES,
    SHAPE,
    Mutation,
    replace_file,
)


def words(change: Callable[[dict[str, Any]], object]) -> Mutation:
    """Change the parsed capture.json."""

    def mutate(folder: Path) -> None:
        document = json.loads((folder / "capture.json").read_bytes())
        change(document)
        (folder / "capture.json").write_text(json.dumps(document))

    return mutate


def raw(old: str, new: str) -> Mutation:
    """Change the text of capture.json."""

    def mutate(folder: Path) -> None:
        text = (folder / "capture.json").read_text()
        assert old in text
        (folder / "capture.json").write_text(text.replace(old, new, 1))

    return mutate


def known(**fields: object) -> Mutation:
    return words(lambda document: document["knowledge"].update(fields))


def model(name: object = "fc2", **kwargs: object) -> Mutation:
    return words(lambda document: document.update(model={"name": name, "kwargs": kwargs}))


def first_round(**fields: object) -> Mutation:
    return words(lambda document: document["rounds"][0].update(fields))


def two_aggregates(document: dict[str, Any]) -> None:
    document["rounds"] = [{**document["rounds"][0], "clients": 2, "participants": None}] * 2


def both(*mutations: Mutation) -> Mutation:
    def mutate(folder: Path) -> None:
        for each in mutations:
            each(folder)

    return mutate


def content(name: str, change: Callable[[bytes], bytes]) -> Mutation:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def tensor(name: str, change: Callable[[dict[str, Tensor]], object]) -> Mutation:
    """Change the tensors in a file; what `change` returns is not looked at."""

    def mutate(folder: Path) -> None:
        found = load_tensors((folder / name).read_bytes()) if (folder / name).exists() else {}
        change(found)
        save_file({key: value.contiguous().clone() for key, value in found.items()}, folder / name)

    return mutate


def put(**named: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found.update({key.replace("__", "."): value for key, value in named.items()})


def swapped(name: str, kind: str) -> Mutation:
    def mutate(folder: Path) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        replace_file(kind, files.index(folder / name), folder)

    return mutate


def grown(name: str, size: int) -> Mutation:
    """A file that claims to be huge and takes no room."""

    def mutate(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(size)

    return mutate


PARAMS, UPDATE, KNOWLEDGE = "params-0.safetensors", "update-0.safetensors", "knowledge.safetensors"
KWARGS: dict[str, Any] = {"input_shape": list(SHAPE), "hidden": 5, "classes": CLASSES}
