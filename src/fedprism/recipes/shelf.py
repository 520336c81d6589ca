"""Finished cells of a long recipe on disk, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprism import __version__


class Shelf:
    """One JSON file a cell, found by everything that determines the cell. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: Mapping[str, object], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell as it was made, now or in an earlier run. It consists of what JSON can hold."""
        if self._folder is None:
            return make()
        full = {**key, "versions": [__version__, str(torch.__version__)]}
        text = json.dumps(full, sort_keys=True, default=str)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
        found = _read(path, text)
        if found is None:
            # Through JSON also where it is new, so that a run that goes on gives what one in a single go does.
            found = json.loads(json.dumps(make()))
            _write(path, json.dumps({"key": text, "cell": found}))
        return found


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """A cell that is missing, damaged or another's is made again."""
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("key") != key or not isinstance(entry.get("cell"), dict):
        return None
    return dict(entry["cell"])


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".fedprism-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def packed(images: Tensor) -> dict[str, Any]:
    """Pixels in [0, 1] as 256 levels that JSON can hold."""
    levels = (images.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
    return {"shape": list(levels.shape), "levels": base64.b64encode(levels.numpy().tobytes()).decode()}


def unpacked(entry: Mapping[str, Any]) -> Tensor:
    levels = torch.frombuffer(bytearray(base64.b64decode(entry["levels"])), dtype=torch.uint8)
    return levels.view(*entry["shape"]).float() / 255
