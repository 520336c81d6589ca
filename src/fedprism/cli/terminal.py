"""What commands print: results on stdout, progress and one-line complaints on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def complain(sentence: str, code: int = 2) -> int:
    """Print one line. File names and captures may hold anything: control characters do not reach the terminal."""
    print("fedprism:", printable(" ".join(sentence.split())), file=sys.stderr)
    return code


def printable(text: str) -> str:
    """The text without what would steer the terminal: names of files and folders may hold escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def console_for(*, stderr: bool = False) -> Console:
    """Without markup, because captures may hold brackets; what the encoding lacks becomes a question mark."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **settings: Any) -> Text:
            return super().render_str(printable(text), **settings)

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Plain(stderr=stderr, markup=False, highlight=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr where that is a terminal; call what it yields to name what is being done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fedprism.runtime import progress

    console = console_for(stderr=True)
    if not console.is_terminal:
        yield lambda title: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        with progress.listening(lambda done, total: bar.update(task, completed=done, total=total)):
            yield lambda title: bar.reset(task, description=title, total=None)
