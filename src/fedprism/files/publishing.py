"""Writing results so that all of them appear, or nothing does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fedprism.errors import BadInput


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written before a long computation, not after it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise not_writable(folder, f"'{existing.name}' is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise not_writable(folder, "permission denied")


def publish(folder: Path, files: Mapping[str, bytes], *, stale: Iterable[str] = ()) -> None:
    """Put `files` into the folder, in their order, in place of those of an earlier run that match the patterns `stale`.

    Everything is on disk before the first file gets its name, so that a full disk leaves an earlier run as it was.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fedprism-") as staging:
            for name, content in files.items():
                Path(staging, name).write_bytes(content)
            for old in [path for pattern in stale for path in folder.glob(pattern)]:
                old.unlink()
            for name in files:
                os.replace(Path(staging, name), folder / name)
    except OSError as error:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise not_writable(folder, error.strerror or str(error)) from error


def not_writable(folder: Path, reason: str) -> BadInput:
    return BadInput(f"the folder '{folder}' cannot be written ({reason}). Choose another one with -o.")
