"""Finished cells of a long recipe on disk, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism import __version__

_NAME = re.compile(r"[0-9a-f]{20}\.(json|safetensors)|\.fedprism-.*")
"""Of a file on the shelf, and of one that a stop left half-written."""


class Made(NamedTuple):
    """What came of a part of a recipe: what JSON can hold, and tensors."""

    said: dict[str, Any]
    tensors: dict[str, Tensor]


class Shelf:
    """One file a cell, found by everything that determines the cell. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: Mapping[str, object], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell as it was made, now or in an earlier run. It consists of what JSON can hold."""
        if self._folder is None:
            return make()
        text, path = _place(self._folder, key, "json")
        found = _read(path, text)
        if found is None:
            # Through JSON also where it is new, so that a run that goes on gives what one in a single go does.
            found = json.loads(json.dumps(make()))
            _write(path, json.dumps({"key": text, "cell": found}).encode())
        return found

    def made(self, key: Mapping[str, object], make: Callable[[], Made]) -> Made:
        """The same for a cell with tensors."""
        if self._folder is None:
            return make()
        text, path = _place(self._folder, key, "safetensors")
        found = _read_made(path, text)
        if found is None:
            said, tensors = make()
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            _write(path, save(kept, {"key": text, "said": json.dumps(said)}))
            found = Made(json.loads(json.dumps(said)), kept)
        return found

    def clear(self) -> None:
        """Forget everything, so that the next run computes it anew; files of others stay."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self._folder.rmdir()


def _place(folder: Path, key: Mapping[str, object], suffix: str) -> tuple[str, Path]:
    """Everything that determines a cell, as text, and the file that goes by it."""
    text = json.dumps({**key, "versions": [__version__, str(torch.__version__)]}, sort_keys=True, default=str)
    return text, folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.{suffix}"


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """A cell that is missing, damaged or another's is made again."""
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("key") != key or not isinstance(entry.get("cell"), dict):
        return None
    return dict(entry["cell"])


def _read_made(path: Path, key: str) -> Made | None:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("key") != key:
                return None
            return Made(json.loads(about["said"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".fedprism-", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def packed(images: Tensor) -> dict[str, Any]:
    """Pixels in [0, 1] as 256 levels that JSON can hold."""
    levels = (images.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
    return {"shape": list(levels.shape), "levels": base64.b64encode(levels.numpy().tobytes()).decode()}


def unpacked(entry: Mapping[str, Any]) -> Tensor:
    levels = torch.frombuffer(bytearray(base64.b64decode(entry["levels"])), dtype=torch.uint8)
    return levels.view(*entry["shape"]).float() / 255
