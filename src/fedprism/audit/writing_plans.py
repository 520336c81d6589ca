"""A plan as the text of a TOML file, which Python reads but does not write, so that what a report shows can be run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def as_toml(plan: Mapping[str, Any]) -> str:
    """What JSON holds of a plan, in TOML. Keys without a value are left out, which is how TOML says so."""
    plain = {key: value for key, value in plan.items() if not isinstance(value, Mapping)}
    parts = [_lines(plain)] if any(value is not None for value in plain.values()) else []
    parts += [f"[{_key(key)}]\n{_lines(value)}" for key, value in plan.items() if isinstance(value, Mapping)]
    return "\n".join(parts)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if value is not None)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _word(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value if each is not None)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value) if isinstance(value, int | float) else _word(str(value))


def _word(text: str) -> str:
    """In quotes. A letter by itself where JSON would need two escapes for it, which TOML does not put together."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
