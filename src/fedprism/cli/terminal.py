"""What commands print: results on stdout, progress and one-line complaints on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def complain(sentence: str, code: int = 2) -> int:
    """Print one line. File names and captures may hold anything: control characters do not reach the terminal."""
    line = " ".join(sentence.split())
    print("fedprism:", "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    return code


def console_for(*, stderr: bool = False) -> Console:
    """Without markup, because captures may hold brackets; what the encoding lacks becomes a question mark."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def progress_bar() -> AbstractContextManager[Callable[[str], None]]:
    """A progress bar on stderr where that is a terminal; call what it yields to name what is being done."""
    from fedprism.runtime import progress

    return progress.showing(console=console_for(stderr=True))
