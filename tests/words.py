"""Habits that are kept out of what users read, and what to write instead. Add a line to extend the list."""

from __future__ import annotations

import re
from typing import NamedTuple


class Habit(NamedTuple):
    pattern: str
    instead: str


HABITS = (
    Habit(r"\bone (line|row|file|value|number|process|cell|run|image|status|entry|update) an? \w+", "per"),
    Habit(
        r"\b(time|seconds|samples|images|times|iterations|clients|rounds|updates|bits|numbers) an? "
        r"(step|second|image|cell|batch|round|class|client|user|sample|entry|update|bin|worker|table)\b",
        "per",
    ),
    Habit(r"\bis no (proof|guarantee|defense|leak|table|knowledge|field)\b", "is not proof"),
    Habit(r"\bwhere (there|it|they|that|nothing|none) (is|are|was|were)\b", "if there is"),
    Habit(r"\bso that\b", "so"),
    Habit(r"\b(stands?|lies) (in|on|beside|at|above|below|outside|where)\b", "is"),
    Habit(r"\bsays so\b", "name what it says"),
    Habit(r"\bcells?\b", "run"),
    Habit(r"\bgates?\b", "check"),
    Habit(r"\bnull baselines?\b", "baseline"),
    Habit(r"\bthe truth\b", "the ground truth"),
    Habit(r"\b(came|comes|come|coming) back (faithfully|recognisabl[ey]|in traces)\b", "recovered"),
    Habit(r"\bdid not come back\b", "not recovered"),
    Habit(r"\bthe sample that fared worst\b", "the best-recovered sample"),
    Habit(r"\b\d %", "41%, without a space"),
    Habit(r"^#+ What\b", "a heading without What"),
    Habit(r"\bhonest by construction\b", "say what is checked"),
)
"""Each pattern is looked for in lower and upper case, line by line."""


def habits(text: str) -> list[str]:
    """Every line with a habit, and what to write instead."""
    return [
        f"line {number}: {found[0]!r}; write: {habit.instead}"
        for number, line in enumerate(text.splitlines(), 1)
        for habit in HABITS
        if (found := re.search(habit.pattern, line, re.IGNORECASE))
    ]
