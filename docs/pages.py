"""Runs what the pages show: files, Python and commands, in the order of the page and in one empty folder.

    python docs/pages.py docs/tutorials/first-audit.md     # runs a page and writes what its commands print into it

- `<!-- not run -->` in the line before a block leaves it out. The names of a page's Python blocks are shared.
- A block whose first line is a comment with a file's name, such as `# plan.toml`, is written to that file.
- In a block `console`, lines after `$` are commands of fedprism; lines below a command are what it prints. A comment
  `# exit code 1` behind a command says what it ends with.
- A block `text` behind the line `<!-- printed -->` is what the Python block before it prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedprism import cli

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SKIP, PRINTED = "<!-- not run -->", "<!-- printed -->"
FILE = re.compile(r"# ([\w.-]+\.\w+)\n")
EXIT = re.compile(r"# exit code (\d+)\s*$")
NUMBER = re.compile(r"-?\b\d[\d.,]*(e[-+]?\d+)?|∞|\binf\b")
WIDTH = "96"
"""Letters of a line that commands print, so that pages do not depend on a terminal."""


class Block(NamedTuple):
    language: str
    text: str
    line: int
    """Of the first line of text, counted from 1."""
    marks: str
    """The comment in the line before it."""
    start: int
    end: int

    @property
    def runs(self) -> bool:
        return self.marks != SKIP


class Failed(Exception):
    """A command of a page ended with another exit code than the page says."""


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page."""
    return [
        Block(
            language=found[1],
            text=found[2],
            line=page.count("\n", 0, found.start(2)) + 1,
            marks=page[: found.start()].rstrip().rpartition("\n")[2].strip(),
            start=found.start(2),
            end=found.end(2),
        )
        for found in FENCE.finditer(page)
    ]


def commands(block: str) -> Iterator[str]:
    """The command lines of a block, without what they print."""
    return (line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ "))


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    """An empty current folder, with a width of lines, and without what a page imports afterwards."""
    before, modules, width = os.getcwd(), set(sys.modules), os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["COLUMNS"] = WIDTH
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                    del sys.modules[name]
            os.chdir(before)
            os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)


def run(page: str, name: str) -> str:
    """The page as it would be if every printed line in it were written anew."""
    module = types.ModuleType(f"pages.{name}")
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    printed, made, last = "", [], 0
    with empty_folder():
        for block in blocks(page):
            text = block.text
            if not block.runs:
                continue
            if file := FILE.match(text):
                Path(file[1]).write_text(text)
            if block.language == "python":
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile("\n" * (block.line - 1) + text, name, "exec"), module.__dict__)
                printed = output.getvalue()
            elif block.language == "console":
                text = _console(text)
            elif block.marks == PRINTED:
                text = printed
            made += [page[last : block.start], text]
            last = block.end
    del sys.modules[module.__name__]
    return "".join([*made, page[last:]])


def _console(text: str) -> str:
    """A block of commands with what they print, if the block shows what they print."""
    shows = any(line and not line.startswith("$ ") for line in text.splitlines())
    lines = []
    for line in commands(text):
        output = answer(line)
        lines += [f"$ {line}", *(output if shows else [])]
    return "\n".join(lines) + "\n"


def answer(line: str) -> list[str]:
    """Run one command of fedprism in this process: the lines that it prints."""
    expected = EXIT.search(line)
    words = shlex.split(line, comments=True)
    assert words[0] == "fedprism", f"a page runs commands of fedprism only, not {words[0]}: mark the block {SKIP}"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(words[1:])
    if code != (int(expected[1]) if expected else 0):
        raise Failed(f"{line} ended with {code}: {errors.getvalue()}")
    return [told.rstrip() for told in output.getvalue().splitlines() if told.strip()]


def without_numbers(page: str) -> str:
    """Last digits differ between CPUs, and with them the widths of tables."""
    return re.sub(r"[ \t─]+", " ", NUMBER.sub("#", page))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(run(path.read_text(), path.stem))
