"""Public names are fp.NAME and fp.ROOM.NAME: documentation and examples reach no deeper."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
DEEPEST = 2
"""Names of an import, the package and a room."""


def programs(page: Path) -> Iterator[str]:
    text = page.read_text()
    yield from [text] if page.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_imports_reach_no_deeper_than_a_room(page: Path) -> None:
    deep = [
        ast.unparse(node)
        for program in programs(page)
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.split(".")[0] == "fedprism" and node.module.count(".") >= DEEPEST
    ]
    assert deep == []
