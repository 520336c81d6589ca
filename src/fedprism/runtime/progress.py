"""How far a long computation is: solvers report, whoever shows a progress bar listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]


def _nobody(done: int, total: int) -> None:
    """Nobody listens."""


_listener: ContextVar[Listener] = ContextVar("fedprism_progress", default=_nobody)


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
