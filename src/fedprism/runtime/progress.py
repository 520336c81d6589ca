"""How far a long computation is: solvers report, whoever shows a progress bar listens."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Listener = Callable[[int, int], None]

SECONDS_BETWEEN = 0.2
"""Between two updates of a bar in a notebook: each is a message to the browser."""

_listener: ContextVar[Listener] = ContextVar("fedprism_progress", default=lambda done, total: None)


def report(done: int, total: int) -> None:
    """Tell the listener that `done` of `total` steps are done."""
    _listener.get()(done, total)


def listener() -> Listener:
    """Whoever listens now."""
    return _listener.get()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the reports made inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def showing(title: str = "", console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show the reports made inside the block as a bar, in a notebook or on a terminal; elsewhere nothing is shown.

    Call what it yields to begin a new bar with another title. `console`: the terminal, if it is not plain stderr.
    """
    if console is None and in_notebook():
        bar = _NotebookBar(title)
        try:
            with listening(bar.listen):
                yield bar.begin
        finally:
            bar.end()
        return
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = console or Terminal(stderr=True)
    if not console.is_terminal:
        yield lambda title: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None)
        with listening(lambda done, total: bars.update(task, completed=done, total=total)):
            yield lambda title: bars.reset(task, description=title, total=None)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: what it prints goes to a page."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookBar:
    """A bar of plain HTML that is renewed in place: no widgets and no scripts have to be installed."""

    def __init__(self, title: str) -> None:
        from IPython import display

        self._display: Any = display
        self._title, self._last = title, 0.0
        self._handle = self._display.display(self._bar(None, None), display_id=True)

    def begin(self, title: str) -> None:
        self._title = title
        self._handle.update(self._bar(None, None))

    def listen(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._handle.update(self._bar(done, total))

    def end(self) -> None:
        """Leave an empty place: what was computed is shown instead."""
        self._handle.update(self._display.HTML(""))

    def _bar(self, done: int | None, total: int | None) -> Any:
        title = html.escape(self._title)
        if done is None or not total:
            return self._display.HTML(f"{title} <progress></progress>")
        return self._display.HTML(f'{title} <progress value="{done}" max="{total}"></progress> {done} of {total}')
