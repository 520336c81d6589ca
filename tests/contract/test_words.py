"""Text that users see is plain English: messages, help, tables and pages hold none of the habits in `words`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedprism
from words import HABITS, confusing

SOURCE = Path(fedprism.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
TEMPLATES = sorted(SOURCE.rglob("*.j2"))


def _documentation(tree: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, which only developers read, but for those that are the help of commands."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


def _written(node: ast.AST) -> str | None:
    """A string, with the places of values left open."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)  # type: ignore[misc]
    return None


def _texts(path: Path) -> Iterator[str]:
    """The strings of a file that a user may read: words and spaces."""
    tree = ast.parse(path.read_text())
    skipped = set() if path.parent.name == "cli" else {id(node) for node in _documentation(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)} - {id(node)}
    for node in ast.walk(tree):
        text = None if id(node) in skipped else _written(node)
        if text is not None and " " in text.strip():
            yield text


@pytest.mark.parametrize("path", [*FILES, *TEMPLATES], ids=lambda path: str(path.relative_to(SOURCE)))
def test_users_read_plain_english(path: Path) -> None:
    texts = _texts(path) if path.suffix == ".py" else [re.sub(r"\{[{%#].*?[#%}]\}", " ", path.read_text())]
    assert [(each, text) for text in texts for each in confusing(text)] == []


@pytest.mark.parametrize(
    "text",
    ["one line a client", "nobody knows the truth", "what came back", "expected a plan, found none; write one."],
)
def test_habits_are_noticed(text: str) -> None:
    assert confusing(text)


@pytest.mark.parametrize(
    "text", ["one line per client", "the ground truth", "nope.toml: no such file.", "a cell of the table"]
)
def test_plain_words_pass(text: str) -> None:
    assert confusing(text) == []


def test_every_habit_says_what_to_write() -> None:
    assert all(HABITS.values())
