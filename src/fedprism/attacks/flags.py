"""Scalar fields of an attack, and of values it holds such as `starts`, as flags: `--iterations 200 --no-unroll`."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from fedprism.attacks.base import Attack
from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.naming import nearest

AttackT = TypeVar("AttackT", bound=Attack)
TRUTH = {"true": True, "false": False}


class Setting(NamedTuple):
    kind: type
    path: str
    """`iterations`, or `starts.restarts` for a field of a value that the attack holds."""


def settings(holder: type, prefix: str = "") -> dict[str, Setting]:
    """Name -> setting, for every field that a single word can set, of an attack and of the values that it holds."""
    hints, answer = typing.get_type_hints(holder), dict[str, Setting]()
    for field in dataclasses.fields(holder):
        hint, kind = hints[field.name], _scalar(hints[field.name])
        if kind is not None and field.init:
            answer[field.name] = Setting(kind, prefix + field.name)
        elif not prefix and isinstance(hint, type) and dataclasses.is_dataclass(hint) and not issubclass(hint, Attack):
            answer |= settings(hint, f"{field.name}.")
    return answer


def configured(attack: AttackT, values: Mapping[str, Any]) -> AttackT:
    """The attack with these values of its `settings`."""
    known, changes = settings(type(attack)), defaultdict[str, dict[str, Any]](dict)
    for name, value in values.items():
        changes[known[name].path.rpartition(".")[0]][name] = value
    direct = changes.pop("", {})
    inner = {holder: dataclasses.replace(getattr(attack, holder), **changed) for holder, changed in changes.items()}
    return dataclasses.replace(attack, **direct, **inner)  # type: ignore[type-var]


def usage(attack: Attack) -> str:
    """The flags of an attack and their defaults, one per line."""
    return "\n".join(
        f"--{name.replace('_', '-')} {_plain(attrgetter(setting.path)(attack))}"
        for name, setting in settings(type(attack)).items()
    )


def apply(words: Sequence[str], attack: AttackT, *, siblings: Sequence[str] = ()) -> tuple[AttackT, list[str]]:
    """The attack with its flags among `words` set, and the words that are no flags; `siblings`: the command's flags."""
    known = {name.replace("_", "-"): setting.kind for name, setting in settings(type(attack)).items()}
    changes: dict[str, Any] = {}
    others: list[str] = []
    left = deque(words)
    while left:
        word = left.popleft()
        if not word.startswith("-") or word == "-":
            others.append(word)
            continue
        flag, equals, value = word.removeprefix("--").partition("=")
        if flag.startswith("no-") and known.get(flag[3:]) is bool and not equals:
            flag, value = flag[3:], "false"
        elif flag not in known or not word.startswith("--"):
            raise _unknown(word, [*(f"--{name}" for name in known), *siblings])
        elif not equals:
            value = _following(left, flag, known[flag])
        changes[flag.replace("-", "_")] = _converted(value, flag, known[flag])
    return configured(attack, changes), others


def _scalar(hint: Any) -> type | None:
    """The type behind an annotation that one word can fill, None for any other annotation."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    options = tuple(option for option in options if option is not type(None))
    if len(options) != 1 or not isinstance(options[0], type):
        return None
    return options[0] if options[0] in (int, float, bool, str) or issubclass(options[0], Enum) else None


def _following(left: deque[str], flag: str, kind: type) -> str:
    """The value that follows a flag. A switch may stand alone, so it takes the next word only if that is its value."""
    if kind is bool:
        return left.popleft() if left and left[0].lower() in TRUTH else "true"
    if not left:
        raise BadInput(f"expected {_wanted(kind)} after --{flag}, found nothing; give one.")
    return left.popleft()


def _converted(text: str, flag: str, kind: type) -> Any:
    try:
        value = TRUTH[text.lower()] if kind is bool else kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError) as error:
        raise BadInput(f"expected --{flag} to be {_wanted(kind)}, found {shown(text)}; correct it.") from error


def _wanted(kind: type) -> str:
    if issubclass(kind, Enum):
        return " or ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a finite number", bool: "true or false"}.get(kind, "a word")


def _unknown(word: str, available: list[str]) -> BadInput:
    flag, everything = word.partition("=")[0], f"use one of {', '.join(available)}."
    hint = nearest(flag, available)
    close = f"{hint.removesuffix('?')}, or {everything}" if hint.endswith("?") else everything
    return BadInput(f"expected a flag of this attack, found {shown(flag)}; {close}")


def _plain(value: object) -> str:
    if isinstance(value, Enum):
        others = ", ".join(str(member.value) for member in type(value) if member is not value)
        return f"{value.value} (or {others})"
    return str(value).lower() if isinstance(value, bool) else str(value)
