"""Settings of an attack as flags and in plans: `--iterations 200 --decoder smoothest --no-unroll`.

Every number, switch and word is one, however deep it is: of the attack, of a value that it holds such as `starts`, of
an attack inside it. A setting has the name of its field; where two fields have one name, that of what holds it comes
first for the deeper one: `decoder_blurred`. Fields that no single word fills say in their annotation which words do
(`choices`).
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fedprism.attacks.base import Attack
from fedprism.attacks.choices import Numbers, OneOf, TermsOf
from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.naming import nearest

AttackT = TypeVar("AttackT", bound=Attack)
TRUTH = {"true": True, "false": False}

Kind: TypeAlias = type[Any] | OneOf | Numbers
Path: TypeAlias = tuple[str, ...]
"""`("iterations",)`, or `("starts", "restarts")` for a field of a value that the attack holds."""


class Setting(NamedTuple):
    kind: Kind
    path: Path
    value: Any


def scalars(holder: type) -> dict[str, Kind]:
    """Name -> type, for every field of a dataclass that a single number, switch or word fills."""
    hints = typing.get_type_hints(holder)
    kinds = {field.name: _scalar(hints[field.name]) for field in dataclasses.fields(holder) if field.init}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def settings(attack: Attack) -> dict[str, Setting]:
    """Name -> setting, for every number, switch and word of an attack and of the values that it holds."""
    found = list(_within(attack, ()))
    endings = Counter(setting.path[-length:] for setting in found for length in range(1, len(setting.path) + 1))
    names = {}
    for setting in found:
        lengths = range(1, len(setting.path) + 1)
        ending = next((e for e in (setting.path[-length:] for length in lengths) if endings[e] == 1), setting.path)
        names["_".join(ending)] = setting
    return names


def with_choices(attack: AttackT, values: Mapping[str, Any]) -> tuple[AttackT, dict[str, Any]]:
    """The attack with what a word chooses (`OneOf`) set, whose own settings differ, and the values that are left."""
    left = dict(values)
    while True:
        known = settings(attack)
        chosen = {name: known[name] for name in left if name in known and isinstance(known[name].kind, OneOf)}
        if not chosen:
            return attack, left
        changes = {setting.path: converted(left.pop(name), name, setting.kind) for name, setting in chosen.items()}
        attack = _rebuilt(attack, changes)


def configured(attack: AttackT, values: Mapping[str, Any]) -> AttackT:
    """The attack with these values of its `settings`."""
    known = settings(attack)
    return _rebuilt(attack, {known[name].path: value for name, value in values.items()})  # type: ignore[no-any-return]


def usage(attack: Attack) -> str:
    """The flags of an attack and their defaults, one per line."""
    return "\n".join(
        f"--{name.replace('_', '-')} {_plain(setting.kind, setting.value)}"
        for name, setting in settings(attack).items()
    )


def apply(words: Sequence[str], attack: AttackT, *, siblings: Sequence[str] = ()) -> tuple[AttackT, list[str]]:
    """The attack with its flags among `words` set, and the words that are no flags; `siblings`: the command's flags."""
    attack, words = _choices_first(words, attack)
    known = {name.replace("_", "-"): setting.kind for name, setting in settings(attack).items()}
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
        changes[flag.replace("-", "_")] = _from_text(value, f"--{flag}", known[flag])
    return configured(attack, changes), others


def converted(value: Any, name: str, kind: Kind) -> Any:
    """A value of a plan in the type of the setting."""
    try:
        if isinstance(kind, OneOf | Numbers):
            return kind.read(value if isinstance(value, str) else "")
        if issubclass(kind, Enum):
            return kind(value)
    except ValueError:
        raise BadInput(f"{name} must be {_wanted(kind)}, not {shown(value)}.") from None
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{name} must be {_wanted(kind)}, not {shown(value)}.")
    return kind(value)


def _within(holder: Any, path: Path) -> Iterator[Setting]:
    """The settings of a value, with those of the values that it holds behind its own."""
    hints, inner = typing.get_type_hints(type(holder), include_extras=True), list[Iterator[Setting]]()
    for field in dataclasses.fields(holder):
        if not field.init:
            continue
        hint, value, here = hints[field.name], getattr(holder, field.name), (*path, field.name)
        words = _words(hint)
        if isinstance(words, TermsOf):
            for name, (type_, each) in words.values(value).items():
                yield Setting(type_, (*here, name), each)
        elif (kind := words or _scalar(hint) or _numbers(hint)) is not None:
            yield Setting(kind, here, value)
        if dataclasses.is_dataclass(value):
            inner.append(_within(value, here))
    for settings in inner:
        yield from settings


def _rebuilt(holder: Any, changes: Mapping[Path, Any]) -> Any:
    """The value with what lies at these paths replaced; everything it holds is checked once, when all of it is set."""
    fields, deeper = dict[str, Any](), defaultdict[str, dict[Path, Any]](dict)
    for path, value in changes.items():
        if len(path) == 1:
            fields[path[0]] = value
        else:
            deeper[path[0]][path[1:]] = value
    for name, inner in deeper.items():
        held = getattr(holder, name)
        words = _words(typing.get_type_hints(type(holder), include_extras=True)[name])
        if isinstance(words, TermsOf):
            fields[name] = words.changed(held, {path[0]: value for path, value in inner.items()})
        else:
            fields[name] = _rebuilt(held, inner)
    return dataclasses.replace(holder, **fields)


def _words(hint: Any) -> OneOf | TermsOf | None:
    """What an annotation says about words."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return next((extra for extra in extras if isinstance(extra, OneOf | TermsOf)), None)


def _options(hint: Any) -> tuple[Any, ...]:
    """What an annotation allows beside None."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(option for option in options if option is not type(None))


def _scalar(hint: Any) -> type | None:
    """The type behind an annotation that one word can fill, None for any other annotation."""
    options = _options(hint)
    if len(options) != 1 or not isinstance(options[0], type):
        return None
    return options[0] if options[0] in (int, float, bool, str) or issubclass(options[0], Enum) else None


def _numbers(hint: Any) -> Numbers | None:
    """The same for a tuple of numbers, or of such tuples."""
    options = _options(hint)
    if len(options) != 1 or typing.get_origin(options[0]) is not tuple:
        return None
    parts = set(typing.get_args(options[0])) - {Ellipsis}
    if parts == {float}:
        return Numbers(nested=False)
    return Numbers(nested=True) if all(_numbers(part) == Numbers(nested=False) for part in parts) else None


def _choices_first(words: Sequence[str], attack: AttackT) -> tuple[AttackT, list[str]]:
    """The attack with what flags choose by a word, wherever they stand, and the words without these."""
    left = list(words)
    while True:
        known = settings(attack)
        for place, word in enumerate(left):
            flag, equals, value = word.removeprefix("--").partition("=")
            setting = known.get(flag.replace("-", "_"))
            if setting is None or not word.startswith("--") or not isinstance(setting.kind, OneOf):
                continue
            following = deque(left[place + 1 :])
            value = value if equals else _following(following, flag, setting.kind)
            attack = _rebuilt(attack, {setting.path: _from_text(value, f"--{flag}", setting.kind)})
            left = [*left[:place], *following] if not equals else [*left[:place], *left[place + 1 :]]
            break
        else:
            return attack, left


def _following(left: deque[str], flag: str, kind: Kind) -> str:
    """The value that follows a flag. A switch may stand alone, so it takes the next word only if that is its value."""
    if kind is bool:
        return left.popleft() if left and left[0].lower() in TRUTH else "true"
    if not left:
        raise BadInput(f"--{flag} must be followed by {_wanted(kind)}, not by nothing.")
    return left.popleft()


def _from_text(text: str, flag: str, kind: Kind) -> Any:
    try:
        if isinstance(kind, OneOf | Numbers):
            return kind.read(text)
        value = TRUTH[text.lower()] if kind is bool else kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError) as error:
        raise BadInput(f"{flag} must be {_wanted(kind)}, not {shown(text)}.") from error


def _wanted(kind: Kind) -> str:
    if isinstance(kind, OneOf | Numbers):
        return kind.wanted
    if issubclass(kind, Enum):
        return " or ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a finite number", bool: "true or false"}.get(kind, "a word")


def _unknown(word: str, available: list[str]) -> BadInput:
    flag, everything = word.partition("=")[0], f"use one of {', '.join(available)}."
    hint = nearest(flag, available)
    close = f"{hint.removesuffix('?')}, or {everything}" if hint.endswith("?") else everything
    return BadInput(f"this attack has no flag {shown(flag)}; {close}")


def _plain(kind: Kind, value: Any) -> str:
    if isinstance(kind, Numbers):
        return kind.written(value)
    if isinstance(kind, OneOf):
        word = kind.written(value)
        return f"{word} (or {', '.join(other for other in kind.words if other != word)})"
    if isinstance(value, Enum):
        others = ", ".join(str(member.value) for member in type(value) if member is not value)
        return f"{value.value} (or {others})"
    return str(value).lower() if isinstance(value, bool) else str(value)
