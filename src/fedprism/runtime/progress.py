"""How far a long computation is: solvers report, whoever shows a progress bar listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]


_listener: ContextVar[Listener] = ContextVar("fedprism_progress", default=lambda done, total: None)


def report(done: int, total: int) -> None:
    """Tell the listener that `done` of `total` steps are done."""
    _listener.get()(done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the reports made inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
