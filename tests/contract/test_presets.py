"""Presets: what a paper sets, any field changed by a call, and signatures that say so."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import fedprism as fp
from fedprism.attacks import ATTACKS


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_takes_its_fields_as_keywords(name: str) -> None:
    make = ATTACKS[name]
    plain = make()
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.init}  # type: ignore[arg-type]
    assert make(**fields) == plain
    parameters = inspect.signature(make).parameters
    assert {name: each.default for name, each in parameters.items()} == fields
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())
    with pytest.raises(TypeError, match="no_such_setting"):
        make(no_such_setting=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        make(1)  # type: ignore[call-arg]


def test_a_preset_changes_what_is_asked_and_nothing_else() -> None:
    plain, changed = fp.attacks.inverting_gradients(), fp.attacks.inverting_gradients(iterations=100)
    assert changed.iterations == 100
    assert dataclasses.replace(changed, iterations=plain.iterations) == plain
    assert fp.attacks.idlg.__name__ == "idlg"
    assert fp.attacks.idlg(labels=fp.attacks.Labels.JOINT) == fp.attacks.dlg()


def test_a_changed_preset_is_checked_as_any_attack() -> None:
    with pytest.raises(fp.FedprismError, match="iterations at least one"):
        fp.attacks.idlg(iterations=0)
