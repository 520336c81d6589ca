"""What commands print: results on stdout, progress and one-line complaints on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Printing:
    """What the options that all commands share ask for: set anew by each command."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False


PRINTING = Printing()


def complain(sentence: str, code: int = 2) -> int:
    """Print one line. File names and captures may hold anything: control characters do not reach the terminal."""
    print("error:", printable(" ".join(sentence.split())), file=sys.stderr)
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
    return Plain(stderr=stderr, markup=False, highlight=False, emoji=False, quiet=stderr and PRINTING.quiet)


def answer(data: Any, lines: Callable[[], Iterable[Any]]) -> None:
    """Print the result of a command: `data` as JSON if that was asked for, else lines for a person."""
    if PRINTING.json:
        from fedprism.files.json_text import as_json

        sys.stdout.write(as_json(data).decode())
        return
    console = console_for()
    for line in lines():
        console.print(line, soft_wrap=isinstance(line, str))


def progress_bar() -> AbstractContextManager[Callable[[str], None]]:
    """A progress bar on stderr if that is a terminal; call what it yields to name what is being done."""
    from fedprism.runtime import progress

    return nullcontext(lambda title: None) if PRINTING.quiet else progress.showing(console=console_for(stderr=True))
