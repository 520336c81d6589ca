"""A folder for one process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedprism.errors import BadInput
from fedprism.files.publishing import not_writable, require_writable


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Two audits in one folder would overwrite each other. The lock goes with the process, however it ends."""
    require_writable(root)
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / ".lock", "w")  # noqa: SIM115 (closed below, after what it protects)
    except OSError as error:
        raise not_writable(root, error.strerror or str(error)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise BadInput(f"another audit is running in '{root}'. Wait for it to finish.") from error
    try:
        yield
    finally:
        lock.close()
