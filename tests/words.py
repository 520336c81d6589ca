"""Habits of language that confuse readers, each with what to write instead. To forbid another, add a line."""

from __future__ import annotations

import re

PER = "attacker batch cell client configuration core image layer line round row sample seed step user window worker"

HABITS = {
    r"\bcells?\b(?! of the table)": "run",
    r"\bgates?\b": "check",
    r"(?<!ground )\b(?:the|its|a) truth\b": "ground truth",
    r"\b(?:came|comes?|coming) back\b": "recovered, returned",
    r"\bdid not come back\b": "not recovered",
    r"\bnull baselines?\b": "baseline",
    r"\brecordings?\b (?=of|without|on|shows?|may)": "capture",
    r"\b(?:is|are) no (?:proof|guarantee|defense|leak|table|knowledge|field)\b": "is not proof",
    r"\bMind\b": "Caveats",
    r"\bstands? (?:for|in|on|beside|above|below|between|at|outside|where)\b": "is, means",
    r"\blies\b": "is",
    r"\bsays so\b": "states it",
    r"\bso that\b": "so",
    r"\b(?:None|empty|nothing|infinite|NaN) where\b": "if",
    r"\b(?:line|row|value|number|time|one|mean|image|process)s? an? (?:" + "|".join(PER.split()) + r")\b": "per",
    r"\bexpects? .*, found |\bexpected .*, found ": "NAME: what is wrong. What to do.",
}
"""In what the program says and in pages alike."""

OF_PAGES = {
    r"\bone (?:line|row|file|value|number|process|run|image|status|entry|update) an? \w+": "per",
    r"\b(?:time|seconds|samples|images|times|iterations|clients|rounds|updates|bits|numbers) an? "
    r"(?:step|second|image|batch|round|class|client|user|sample|entry|update|bin|worker|table)\b": "per",
    r"\bwhere (?:there|it|they|that|nothing|none) (?:is|are|was|were)\b": "if there is",
    r"\b\d %": "41%, without a space",
    r"^#+ What\b": "a heading without What",
    r"\bthe sample that fared worst\b": "the best-recovered sample",
    r"(?i)\bhonest by construction\b": "what is checked",
}
"""In pages only."""


def confusing(text: str) -> list[tuple[str, str]]:
    """The habits in what the program says: the words, and what to write instead."""
    plain = " ".join(text.split())
    return [(found[0], instead) for habit, instead in HABITS.items() for found in re.finditer(habit, plain)]


def habits(page: str) -> list[str]:
    """Every line of a page with a habit, and what to write instead."""
    return [
        f"line {number}: {found[0]!r}; write: {instead}"
        for number, line in enumerate(page.splitlines(), 1)
        for habit, instead in {**HABITS, **OF_PAGES}.items()
        if (found := re.search(habit, line))
    ]
