"""Values in one line, however much they hold: tensors by type and shape, long tuples by their length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

MOST_ENTRIES = 8
"""Numbers and words of a tuple, a set or a mapping that are shown."""
MOST_PARTS = 1
"""Tensors, rounds and whatever else takes more room, of which that many are shown."""
MOST_LETTERS = 80
"""Of a text."""
DEEPEST = 3
"""Values inside values: what lies deeper is shown by the name of its type."""

_MISSING = dataclasses.MISSING


def short(value: object, depth: int = 0) -> str:
    """The value in a few words. Tensors that lie in a file are not read."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {value.item():.6g}" if value.dim() == 0 else f"{kind} {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return repr(value if len(value) <= MOST_LETTERS else value[: MOST_LETTERS - 3] + "...")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return _mapping(value, depth)
    if isinstance(value, tuple | list | set | frozenset):
        return _collection(value, depth)
    if isinstance(value, ShortRepr):
        return fields_in_words(value, value._shown_fields(), depth)
    text = repr(value)
    return text if len(text) <= 2 * MOST_LETTERS else f"{type(value).__name__}(...)"


def fields_in_words(value: object, shown: Iterable[tuple[str, object]], depth: int = 0) -> str:
    """A value as a call of its type with these fields."""
    if depth >= DEEPEST:
        return f"{type(value).__name__}(...)"
    fields = ", ".join(f"{name}={short(each, depth + 1)}" for name, each in shown)
    return f"{type(value).__name__}({fields})"


class ShortRepr:
    """Mixin for dataclasses (with repr=False) that hold data: what differs from the defaults, each in a few words."""

    def __repr__(self) -> str:
        return fields_in_words(self, self._shown_fields())

    def _shown_fields(self) -> list[tuple[str, object]]:
        fields = (field for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        named = [(field, getattr(self, field.name)) for field in fields]
        return [(field.name, value) for field, value in named if not _as_by_default(value, field)]


def _as_by_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not _MISSING:
        return bool(value == field.default_factory())
    if value is field.default:
        return True
    return isinstance(value, str | int | float | frozenset) and bool(value == field.default)


def _mapping(value: Mapping[Any, object], depth: int) -> str:
    if not isinstance(value, dict):  # entries may be read from a file when they are asked for
        return f"{len(value)} entries"
    if value and all(isinstance(each, Tensor) for each in value.values()):
        return f"{len(value)} tensor{'' if len(value) == 1 else 's'}"
    return "{" + _listed(value, lambda key: f"{short(key, depth + 1)}: {short(value[key], depth + 1)}", depth) + "}"


def _collection(value: Collection[Any], depth: int) -> str:
    entries = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    listed = _listed(entries, lambda each: short(each, depth + 1), depth)
    if isinstance(value, tuple):
        return f"({listed},)" if len(value) == 1 else f"({listed})"
    return f"[{listed}]" if isinstance(value, list) else "{" + listed + "}"


def _listed(entries: Collection[Any], words: Callable[[Any], str], depth: int) -> str:
    """Some of the entries, and how many more there are."""
    if depth >= DEEPEST and len(entries) > 1:
        return f"{len(entries)} entries"
    plain = all(isinstance(each, str | int | float | bool | None) for each in entries)
    shown = [words(each) for each, _ in zip(entries, range(MOST_ENTRIES if plain else MOST_PARTS), strict=False)]
    more = len(entries) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])
