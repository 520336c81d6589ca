"""Scalar fields of attacks, and of the values that attacks hold, as flags and settings of plans."""

from __future__ import annotations

import pytest

import fedprism as fp
from fedprism.attacks import Engine, Pull, Starts, flags
from fedprism.audit.entries import configured


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
        ({"restarts": 1.5}, "restarts must be a whole number"),
        ({"restarts": 20}, "race times restarts"),
        ({"starts": 1}, "has no setting 'starts'"),
    ):
        with pytest.raises(fp.errors.BadInput, match=words):
            configured(attack, settings, "inverting-gradients")


def test_fields_that_share_a_name_are_told_apart() -> None:
    attack, _ = flags.apply(["--inversion-iterations", "7"], fp.attacks.cocktail_party())
    assert attack.inversion.iterations == 7
    with pytest.raises(fp.errors.BadInput, match="--inversion-iterations"):
        flags.apply(["--iterations", "7"], fp.attacks.cocktail_party())
    mkor, _ = flags.apply(["--blurred", "--decoder-blurred", "2", "--decoder=smoothest"], fp.attacks.mkor())
    assert mkor == fp.attacks.Mkor(blurred=True, decoder=fp.attacks.Smoothest(blurred=2.0))


def test_terms_of_the_objective_have_weights() -> None:
    attack, _ = flags.apply(["--total-variation", "0.5", "--orthogonality", "0.1"], fp.attacks.GradientMatching())
    assert attack.priors == (fp.attacks.TotalVariation(0.5), fp.attacks.Orthogonality(0.1))
    assert flags.apply(["--total-variation", "0"], attack)[0].priors == (fp.attacks.Orthogonality(0.1),)


def test_words_and_numbers_that_are_none_are_refused() -> None:
    for words, complaint in (
        (["--decoder", "best"], "--decoder must be midpoint or interpolated"),
        (["--decoder"], "--decoder must be followed by midpoint or interpolated"),
        (["--iterations", "5"], "no flag '--iterations'"),  # the midpoint has none
        (["--brightness", "0.4,x"], "numbers such as"),
        (["--brightness", "0.4/0.5"], "numbers such as"),
        (["--normalization", "inf,1/1,1"], "numbers such as"),
    ):
        with pytest.raises(fp.errors.BadInput, match=complaint):
            flags.apply(words, fp.attacks.mkor())
    with pytest.raises(fp.errors.BadInput, match="sought must be holds-class or negative"):
        configured(fp.attacks.property_inference(), {"sought": 3}, "property-inference")


def test_an_attack_behind_a_reduction_has_its_settings_too() -> None:
    both = fp.attacks.then(fp.attacks.disaggregation(), fp.attacks.inverting_gradients())
    changed, _ = flags.apply(["--time-limit", "5", "--iterations", "3"], both)
    wanted = fp.attacks.inverting_gradients(), fp.attacks.Disaggregation(time_limit=5.0)
    assert repr(changed) == repr(fp.attacks.then(wanted[1], flags.configured(wanted[0], {"iterations": 3})))
