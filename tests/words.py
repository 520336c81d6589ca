"""Habits of language that confuse readers, each with what to write instead. To forbid another, add a line."""

from __future__ import annotations

import re

PER = "attacker batch cell client configuration core image layer line round row sample seed step user window worker"

HABITS = {
    r"\bcells?\b(?! of the table)": "run",
    r"\bgates?\b": "check",
    r"(?<!ground )\b(?:the|its|a) truth\b": "ground truth",
    r"\b(?:came|comes?|coming) back\b": "recovered, returned",
    r"\bnull baselines?\b": "baseline",
    r"\brecordings?\b (?=of|without|on|shows?|may)": "capture",
    r"\bis no proof\b": "is not proof",
    r"\bare no proof\b": "are not proof",
    r"\bMind\b": "Caveats",
    r"\bstands? (?:for|in|on|beside|above|below|between)\b": "is, means",
    r"\blies\b": "is",
    r"\bsays so\b": "states it",
    r"\bso that\b": "so",
    r"\b(?:None|empty|nothing|infinite|NaN) where\b": "if",
    r"\b(?:line|row|value|number|time|one|mean|image|process)s? an? (?:" + "|".join(PER.split()) + r")\b": "per",
    r"\bexpects? .*, found |\bexpected .*, found ": "NAME: what is wrong. What to do.",
}


def confusing(text: str) -> list[tuple[str, str]]:
    """The habits in a text: the words, and what to write instead."""
    plain = " ".join(text.split())
    return [(found[0], instead) for habit, instead in HABITS.items() for found in re.finditer(habit, plain)]
