"""Scalar fields of attacks, and of the values that attacks hold, as flags and settings of plans."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest

import fedprism as fp
from fedprism.attacks import ATTACKS, Attack, Engine, Pull, Starts, flags
from fedprism.audit.entries import configured


@pytest.mark.parametrize("make", ATTACKS.values(), ids=ATTACKS)
def test_every_setting_is_found_where_it_is_said_to_be(make: Callable[[], Attack]) -> None:
    attack = make()
    defaults = {name: attrgetter(setting.path)(attack) for name, setting in flags.settings(type(attack)).items()}
    assert flags.configured(attack, defaults) == attack
    assert len(flags.usage(attack).splitlines()) == len(defaults)


def test_settings_of_a_value_that_an_attack_holds_are_its_own() -> None:
    words = ["--restarts", "2", "--race=0.25", "--no-adaptive", "--pull", "exact", "--memory", "5", "--lr", "0.5", "x"]
    attack, others = flags.apply(words, fp.attacks.inverting_gradients())
    assert others == ["x"]
    assert attack.starts == Starts(restarts=2, race=0.25)
    assert not attack.adaptive
    assert attack.batchnorm.pull is Pull.EXACT
    assert attack.engine == Engine(memory=5)
    assert attack.lr == 0.5
    assert eval(repr(attack), vars(fp.attacks)) == attack


def test_plans_set_them_too_and_are_told_what_is_wrong() -> None:
    attack = fp.attacks.inverting_gradients()
    changed = configured(attack, {"restarts": 1, "pull": "running", "iterations": 3}, "inverting-gradients")
    assert changed.starts == Starts(race=0.1), "the other settings of the same value stay"  # type: ignore[attr-defined]
    assert changed.batchnorm.pull is Pull.RUNNING  # type: ignore[attr-defined]
    for settings, words in (
        ({"restart": 1}, "did you mean restarts"),
        ({"restarts": 1.5}, "restarts to be a whole number"),
        ({"restarts": 20}, "race times restarts"),
        ({"starts": 1}, "expected a setting"),
    ):
        with pytest.raises(fp.errors.BadInput, match=words):
            configured(attack, settings, "inverting-gradients")
