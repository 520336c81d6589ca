"""Reprs that evaluate back to the object, and the nearest valid word for a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from types import FunctionType
from typing import Any


def evaluable(value: Any) -> str:
    """Text that evaluates back to `value`: functions by their name, containers element by element."""
    if isinstance(value, FunctionType):
        return value.__name__
    if isinstance(value, tuple):
        return "(" + "".join(evaluable(item) + ", " for item in value).strip() + ")"
    return repr(value)


class EvaluableRepr:
    """Mixin for dataclasses of hyper-parameters: shows only what differs from the defaults."""

    def __repr__(self) -> str:
        fields = [f for f in dataclasses.fields(self) if f.repr]  # type: ignore[arg-type]
        changed = [f"{f.name}={evaluable(getattr(self, f.name))}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"


def counted(number: int, word: str) -> str:
    """A number with its noun: 1 cell, 2 cells."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the valid words closest to a misspelt one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3)
    if not close:
        return f"use one of {', '.join(names)}."
    likeness = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in close}
    likely = [name for name in close if likeness[name] >= likeness[close[0]] - LIKENESS_MARGIN]
    return f"did you mean {' or '.join(likely)}?"


LIKENESS_MARGIN = 0.1
"""Words less alike the misspelt one than the best by more than this (of 1) are no likely meaning, only long names."""
