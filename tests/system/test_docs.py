"""What the documentation shows works: its Python runs, its quick commands answer, its links lead somewhere.

A block is left out where the line `<!-- not run -->` stands just before it. The blocks of a page share one namespace.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from fedprism import cli

ROOT = Path(__file__).parents[2]
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*RUN, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "research").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
SKIP = "<!-- not run -->"


class Block(NamedTuple):
    language: str
    text: str
    line: int
    runs: bool


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page and the line of its first line of text, counted from 1."""
    return [
        Block(
            language=found[1],
            text=found[2],
            line=page.count("\n", 0, found.start(2)) + 1,
            runs=not page[: found.start()].rstrip().endswith(SKIP),
        )
        for found in FENCE.finditer(page)
    ]


def quick_commands(page: str) -> list[str]:
    """Command lines that answer at once: help, version and lists."""
    lines = [
        line.removeprefix("$ ").partition("#")[0].strip()
        for block in blocks(page)
        if block.language in ("console", "bash") and block.runs
        for line in block.text.splitlines()
    ]
    return [line for line in lines if re.match(r"fedprism (--help|--version|list )", line)]


def links(page: str) -> list[str]:
    """Targets inside the repository, without the part after #."""
    targets = LINK.findall(FENCE.sub("", page))
    local = [target for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [target.partition("#")[0] for target in local]


COMMANDS = sorted({command for page in PAGES for command in quick_commands(page.read_text())})


def short(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", RUN, ids=short)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"docs.{page.stem}"}
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, namespace["__name__"], type(sys)(namespace["__name__"]))
    for block in blocks(page.read_text()):
        if block.language == "python" and block.runs:
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("command", COMMANDS)
def test_quick_commands_answer(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in links(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


def test_the_reader_of_pages_finds_what_is_there() -> None:
    page = (
        "[a](docs/x.md#part) ![b](y.png) [c](https://example.org) [d](#here)\n"
        "```python\none = 1\n```\n<!-- not run -->\n```python\nraise ValueError\n```\n"
        "```console\n$ fedprism list attacks\n$ fedprism demo\nfedprism --help   # all of it\n```\n"
    )
    found = blocks(page)
    assert [(block.language, block.runs) for block in found] == [("python", True), ("python", False), ("console", True)]
    assert page.splitlines()[found[0].line - 1] == "one = 1"
    assert quick_commands(page) == ["fedprism list attacks", "fedprism --help"]
    assert links(page) == ["docs/x.md", "y.png"]
