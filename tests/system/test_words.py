"""README and the site are in plain English: the worst habits are kept out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from words import habits

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MADE = re.compile(r"<!-- (?:table|figures): .*?<!-- end of (?:table|figures) -->|^```.*?^```", re.DOTALL | re.MULTILINE)
"""What programs write into pages, and code: the words of the source are tested there."""


def prose(page: str) -> str:
    """The page without what is made, with the same numbers of lines."""
    return MADE.sub(lambda found: "\n" * found[0].count("\n"), page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert habits(prose(page.read_text())) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "One line an attacker, worst first.",
        "A failed attack is no proof.",
        "What the plan names stands in the results.",
        "Text so that it reads.",
        "The GPU is taken where there is one.",
        "## What a cell is",
        "12 cells, 95 % of them",
    ],
)
def test_a_habit_is_found(sentence: str) -> None:
    assert habits(sentence)


def test_plain_sentences_and_code_are_left_alone() -> None:
    assert habits(prose("```text\nso that a cell\n```\nOne line per attacker. It is not proof. Run it again.\n")) == []
    assert habits("first\nso that") == ["line 2: 'so that'; write: so"]
