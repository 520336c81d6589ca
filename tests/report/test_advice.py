"""What a report says of numbers: readings, the recommendation, and who is told apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedprism.audit import Audit
from fedprism.evaluation.severity import Leak
from fedprism.evaluation.verdict import Verdict, leak_of
from fedprism.report import advice, verdict
from fedprism.report.configurations import Configuration, configurations
from fedprism.utility.measuring import NOTHING_LEARNED
from planted_audits import NAMED, attack, captured, ceiling, figure, utility


def rows(*entries: dict[str, Any]) -> tuple[Configuration, ...]:
    return configurations(Audit(Path(), NAMED, entries, (), None, ()))


def advised(*entries: dict[str, Any]) -> advice.Advice:
    return advice.advise(advice.options(rows(*entries), {}), "psnr")


@pytest.mark.parametrize(
    ("entry", "leak"),
    [
        (attack(psnr=35.0), Leak.FAITHFUL),
        (attack(psnr=math.inf), Leak.FAITHFUL),
        (attack(psnr=11.0, metrics={"psnr": figure(11.0, closest=31.0)}), Leak.FAITHFUL),
        (attack(psnr=35.0, metrics={"psnr": figure(35.0, null=36.0)}), Leak.GONE),
        (attack(metrics={"mse": figure(5e-4, off=None, null=0.05)}), Leak.FAITHFUL),
        (attack(ssim=0.6), Leak.RECOGNISABLE),
        (attack(metrics={"ssim": figure(0.6, off=None, null=0.55)}), Leak.TRACES),
        (attack(metrics={"ssim": figure(0.3, off=0.9, null=0.05)}), Leak.TRACES),
        (attack(psnr=15.0), Leak.TRACES),
        (attack(psnr=15.0, returned=1), Leak.GONE),
        (attack(metrics={"psnr": figure(15.0, off=5.0, null=13.0)}), Leak.GONE),
        (attack(), Leak.GONE),
        (attack(metrics={"avd_floor": figure(0.1, null=0.3)}, returned=0), Leak.GONE),
        (attack(metrics={"columns": figure(0.7, closest=1.0, null=0.4)}), Leak.FAITHFUL),
        (attack(metrics={"columns": figure(0.5, off=0.3, closest=0.85, null=0.4)}), Leak.RECOGNISABLE),
        (attack(metrics={"update-error": figure(0.6, closest=1e-5, null=None)}), Leak.FAITHFUL),
        (attack(metrics={"update-error": figure(0.9, null=None)}), Leak.GONE),
        (attack(outcomes={"failed": 2}, metrics={}), Leak.UNTESTED),
        (captured(), Leak.EXPLAINED),
        (captured(residual=0.5), Leak.UNKNOWN),
    ],
)
def test_readings_follow_the_numbers(entry: dict[str, Any], leak: Leak) -> None:
    assert leak_of(rows(entry)[0]) is leak


LOW, HIGH = ceiling(14.0), ceiling(28.0)


def test_the_protected_option_that_costs_least_is_recommended() -> None:
    found = advised(
        attack(psnr=40.0),
        attack(defense="clip", psnr=25.0, ssim=0.8),
        attack(defense="noise", ceiling=LOW),
        attack(defense="more noise", ceiling=ceiling(11.0)),
        attack(defense="prune", ceiling=HIGH),
        utility("none", 0.9),
        utility("clip", 0.88),
        utility("noise", 0.85),
        utility("more noise", 0.81),
        utility("prune", 0.9),
    )
    assert found.chosen is not None
    assert found.headline == "Use noise."
    assert found.reasons[0].startswith("No attacker gets more than 14.0 dB (95% confidence) on average, assuming")
    assert "Without a defense, samples were recovered." in found.reasons
    assert found.price[0] == "Test accuracy 85.0% (95% interval 84.0% to 86.0%), without a defense 90.0%."
    assert "It gives no guarantee of differential privacy." in found.price
    assert any("someone who knows the defense" in caution for caution in found.cautions)


def test_of_equal_accuracy_the_lower_ceiling_then_the_faster_is_recommended() -> None:
    entries = [
        attack(psnr=40.0),
        attack(defense="a", ceiling=LOW),
        attack(defense="b", ceiling=ceiling(12.0)),
        attack(defense="c", ceiling=ceiling(12.0)),
        *(utility(name, 0.9) for name in ("none", "a", "b", "c")),
    ]
    keys = {row.cell.defense: row.key for row in rows(*entries) if row.cell.kind == "utility"}
    times = {keys["b"]: 2.0, keys["c"]: 1.5}
    assert advice.advise(advice.options(rows(*entries), times), "psnr").headline == "Use c."


def test_a_defense_against_which_attacks_merely_failed_is_never_recommended() -> None:
    found = advised(attack(psnr=40.0), attack(defense="clip"), attack(defense="noise", ceiling=HIGH))
    assert found.chosen is None
    assert found.headline == "None of the tested defenses is acceptable."
    assert found.reasons[0] == "no defense: samples were recovered."
    assert "clip: The tested attacks failed (the best leaves a residual of 0.25" in found.reasons[1]
    assert "the ceiling is 28.0 dB (95% confidence), so a better attack may succeed" in found.reasons[2]
    assert advised(attack(), attack(defense="noise")).chosen is None, "failed attacks without a defense, too"


@pytest.mark.parametrize(
    ("accuracy", "tolerated", "chosen"), [(0.81, 10.0, True), (0.79, 10.0, False), (0.79, 12.0, True)]
)
def test_a_defense_may_cost_so_many_points_and_no_more(accuracy: float, tolerated: float, chosen: bool) -> None:
    entries = [attack(psnr=40.0), attack(defense="dp", ceiling=LOW), utility("none", 0.9), utility("dp", accuracy, 3.0)]
    found = advice.advise(
        advice.options(rows(*entries), {rows(entries[-1])[0].key: 2.5}), "psnr", 1e-5, tolerated=tolerated
    )
    assert (found.chosen is not None) == chosen
    if chosen:
        assert "A training step takes 2.50 times as long." in found.price
        assert "It guarantees each example epsilon 3 at delta 1e-05 over the whole training." in found.price
    else:
        assert "dp: it costs 11.0 points of accuracy, and 10 are tolerated." in found.reasons


NOT_MEASURED = "No defense can be recommended: the utility was not measured."


def test_a_recommendation_needs_evidence_of_utility() -> None:
    entries = [attack(psnr=40.0), attack(defense="dp", ceiling=LOW), utility("none", 0.3), utility("dp", 0.3)]
    assert advised(*entries).headline == "Use dp."
    for lacking in ([utility("none", 0.3)], [utility("dp", 0.3)], []):
        found = advised(*entries[:2], *lacking)
        assert (found.chosen, found.headline) == (None, NOT_MEASURED)
        assert "dp: it is protected, but its cost was not measured: add [utility]" in found.reasons[1]
    at_chance = [{**entry, "statuses": [NOTHING_LEARNED]} for entry in entries[2:]]
    found = advised(*entries[:2], *at_chance)
    assert (found.chosen, found.headline) == (None, NOT_MEASURED)
    assert "not clearly better than always predicting the most frequent class" in found.reasons[1]
    leaking = advised(attack(psnr=40.0), attack(defense="dp", psnr=40.0), *at_chance)
    assert leaking.headline == "None of the tested defenses is acceptable.", "no utility would change that"
    needless = advised(attack(ceiling=LOW), attack(defense="dp", ceiling=LOW))
    assert needless.headline.startswith("No defense is needed"), "which costs nothing"


def test_a_defense_that_was_tested_with_its_attacker_knowing_it_has_no_such_caution() -> None:
    informed = attack(defense="noise", threat="honest_but_curious +defense", ceiling=LOW)
    costs = (utility("none", 0.9), utility("noise", 0.9))
    found = advised(attack(psnr=40.0), attack(defense="noise", labels_leaked=1.0, ceiling=LOW), informed, *costs)
    assert found.cautions == ("Labels still leak under it.",)


def test_nothing_is_recommended_that_failed_or_was_not_tested() -> None:
    broken = attack(defense="noise", outcomes={"done": 1, "failed": 1}, reasons=["out of memory"], ceiling=LOW)
    assert advised(attack(psnr=40.0), broken).chosen is None
    untested = attack(outcomes={"failed": 1}, metrics={})
    assert advised(untested).headline == "No recommendation: no attack ran to completion."
    assert advised(captured()).headline.startswith("No recommendation: recorded updates")
    assert advised(attack(psnr=40.0)).headline == "No defense was tested."
    needless = advised(attack(ceiling=LOW), attack(defense="noise", ceiling=LOW), utility("none", 0.9))
    assert needless.headline.startswith("No defense is needed: the ceiling is low")


def said_of(*entries: dict[str, Any]) -> str:
    return " ".join(verdict.headline(rows(*entries), "psnr", "random weights"))


def test_only_an_attack_that_succeeds_without_a_defense_is_stopped_by_one() -> None:
    nothing = said_of(attack(), attack(defense="clip"))
    assert "No attack succeeds without a defense" in nothing
    assert "stopped every" not in nothing
    assert "Of 1 defense, 1 stopped every attack that succeeds without it (noise)" in said_of(
        attack(psnr=40.0), attack(defense="noise")
    )
    other = attack(attack="mkor", settings="Mkor()", defense="noise")
    assert "No attack succeeds" in said_of(attack(psnr=40.0), other), "another attack than the one that succeeds"
    informed = attack(defense="noise", threat="honest_but_curious +defense", psnr=40.0)
    assert "0 stopped" in said_of(attack(psnr=40.0), attack(defense="noise"), informed)


def test_what_multiplies_an_update_by_one_number_stops_nothing() -> None:
    said = said_of(attack(psnr=40.0), attack(defense="clip(norm=1.0)"), attack(defense="prune(ratio=0.9)"))
    assert "Of 2 defenses, 1 stopped every attack that succeeds without it (prune(ratio=0.9))" in said
    both = said_of(attack(psnr=40.0), attack(defense="clip(norm=1.0) + prune(ratio=0.9)"))
    assert "1 stopped" in both
    alone = said_of(attack(psnr=40.0), attack(defense="clip(norm=1.0)"))
    assert "0 stopped" in alone


def test_what_was_not_tested_is_not_called_stopped() -> None:
    broken = attack(defense="noise", attack="idlg", outcomes={"failed": 2}, metrics={}, samples=0)
    said = said_of(attack(psnr=40.0), attack(defense="noise"), broken, attack(defense="dp", psnr=41.0))
    assert "Of 2 defenses, 0 stopped every attack that succeeds without it." in said
    assert "1 of 4 configurations have no result" in said
    nothing = attack(outcomes={"failed": 2}, metrics={}, samples=0)
    assert said_of(nothing) == "Nothing was tested: no attack ran to completion."


def test_random_and_trained_weights_are_told_apart() -> None:
    for words in ("random weights", "trained weights (b)"):
        sentences = verdict.headline(rows(attack(psnr=40.0), attack(clients=2)), "psnr", words)
        assert sentences[0].startswith("The server, following the protocol, recovered 2 of 2 private samples without")
        assert "1 of 2 settings is inconclusive." in sentences
        (finding,) = verdict.findings(rows(attack(psnr=40.0), attack(clients=2)), "psnr", words)
        assert finding.sentence.startswith(f"With {words} and no defense, private samples were recovered")


def test_attackers_are_told_apart_by_what_they_know() -> None:
    found = verdict.findings(
        rows(
            attack(defense="noise", threat="honest_but_curious +defense -batch_size", knowledge_used=["defense"]),
            attack(psnr=40.0, threat="eavesdropper"),
            attack(threat="somebody else", ceiling=LOW),
        ),
        "psnr",
        "random weights",
    )
    assert [each.verdict for each in found] == [Verdict.LEAKS, Verdict.INCONCLUSIVE, Verdict.PROTECTED]
    assert found[0].who == "Someone who reads a client's traffic"
    assert found[1].who == "The server, following the protocol, also knowing the defense, not knowing the batch size"
    assert found[1].knowledge == (("dense-inversion", ("defense",)),)
    assert found[2].who == "Somebody else"
