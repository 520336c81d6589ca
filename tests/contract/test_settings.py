"""Every number, switch and word of every attack can be set on the command line and in a plan, both in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

import fedprism as fp
from fedprism.attacks import ATTACKS, Attack, flags
from fedprism.attacks.choices import Numbers, OneOf
from fedprism.audit.entries import configured

ROWS: dict[str, Callable[[], Attack]] = {
    **ATTACKS,
    "disaggregation, then dlg": lambda: fp.attacks.then(fp.attacks.disaggregation(), fp.attacks.dlg()),
    "mkor, smoothest": lambda: fp.attacks.Mkor(decoder=fp.attacks.Smoothest()),
}


def leaves(holder: Any, path: flags.Path = ()) -> Iterator[flags.Path]:
    """Where everything lies that is not itself made of fields: found without looking at any annotation."""
    for field in dataclasses.fields(holder):
        value = getattr(holder, field.name)
        if not dataclasses.is_dataclass(value):
            yield (*path, field.name)
            continue
        yield from leaves(value, (*path, field.name))


def same_branch(one: flags.Path, other: flags.Path) -> bool:
    """Whether one of the two holds the other."""
    return all(a == b for a, b in zip(one, other, strict=False))


def text(value: Any, kind: flags.Kind) -> str:
    if isinstance(kind, OneOf | Numbers):
        return kind.written(value)
    return str(value).lower() if isinstance(value, bool) else str(value.value if isinstance(value, Enum) else value)


def others(kind: flags.Kind, value: Any) -> list[Any]:
    """Values that differ from this one, of which the attack takes at least one."""
    if isinstance(kind, OneOf):
        return [option for option in kind.words.values() if option != value]
    if isinstance(kind, Numbers):
        return [((0.4, 0.4), (0.2, 0.2)) if kind.nested else (0.4, 0.2)]
    if issubclass(kind, Enum):
        return [member for member in kind if member is not value]
    if kind is bool:
        return [not value]
    return [value + 1 if value is not None else 2] if kind is int else [value / 2 if value else 0.25]


@pytest.mark.parametrize("name", ROWS)
class TestSettings:
    def test_everything_is_one(self, name: str) -> None:
        attack = ROWS[name]()
        paths = [setting.path for setting in flags.settings(attack).values()]
        unset = [leaf for leaf in leaves(attack) if not any(path[: len(leaf)] == leaf for path in paths)]
        assert not unset

    def test_each_changes_what_it_says_and_nothing_else(self, name: str) -> None:
        attack = ROWS[name]()
        known = flags.settings(attack)
        for setting_name, setting in known.items():
            for value in others(setting.kind, setting.value):
                word = text(value, setting.kind)
                changed, rest = flags.apply([f"--{setting_name.replace('_', '-')}", word], attack)
                assert not rest
                plain = word if isinstance(setting.kind, OneOf | Numbers) else value
                assert configured(attack, {setting_name: getattr(plain, "value", plain)}, name) == changed
                after = {s.path: s.value for s in flags.settings(changed).values()}
                assert after[setting.path] == value
                before = {s.path: s.value for s in known.values() if not same_branch(s.path, setting.path)}
                assert {path: after[path] for path in before} == before

    def test_what_a_word_chooses_has_settings_of_its_own(self, name: str) -> None:
        attack = ROWS[name]()
        for choice, setting in flags.settings(attack).items():
            for word in setting.kind.words if isinstance(setting.kind, OneOf) else ():
                chosen = flags.configured(attack, {choice: setting.kind.words[word]})
                inner = {key: each for key, each in flags.settings(chosen).items() if each.path[:-1] == setting.path}
                value = setting.kind.words[word]
                fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
                assert {each.path[-1] for each in inner.values()} == {field.name for field in fields}
                if not inner:
                    continue
                key, each = next(iter(inner.items()))
                wanted = others(each.kind, each.value)[0]
                flag = f"--{key.replace('_', '-')}"
                # The setting may come before the word that makes it one.
                changed, _ = flags.apply(
                    [flag, text(wanted, each.kind), f"--{choice.replace('_', '-')}={word}"], attack
                )
                assert changed == configured(attack, {key: wanted, choice: word}, name) != chosen

    def test_usage_lists_each_with_its_value(self, name: str) -> None:
        attack = ROWS[name]()
        lines = flags.usage(attack).splitlines()
        assert [line.split()[0] for line in lines] == [f"--{n.replace('_', '-')}" for n in flags.settings(attack)]
        assert not any("<function" in line or "object at" in line for line in lines)
