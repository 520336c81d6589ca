"""What a report says of numbers: readings, the recommendation, and who is told apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedprism.audit import Audit
from fedprism.evaluation.severity import Leak
from fedprism.report import advice, verdict
from fedprism.report.configurations import Configuration, configurations
from fedprism.report.judging import judge
from fedprism.utility.measuring import NOTHING_LEARNED
from planted_audits import NAMED, attack, captured, figure, utility


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
        (attack(psnr=15.0, answered=1), Leak.GONE),
        (attack(metrics={"psnr": figure(15.0, off=5.0, null=13.0)}), Leak.GONE),
        (attack(), Leak.GONE),
        (attack(metrics={"avd_floor": figure(0.1, null=0.3)}, answered=0), Leak.GONE),
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
    assert judge(rows(entry)[0]) is leak


def test_the_cheapest_of_those_that_stop_attacks_is_recommended() -> None:
    found = advised(
        attack(psnr=40.0),
        attack(defense="clip", psnr=25.0, ssim=0.8),
        attack(defense="noise"),
        attack(defense="dp"),
        utility("none", 0.9),
        utility("clip", 0.88),
        utility("noise", 0.8),
        utility("dp", 0.7, epsilon=3.0),
    )
    assert found.chosen is not None
    assert found.headline == "Use noise."
    assert "samples did not come back in any of 1 tested configurations" in found.reasons[0]
    assert "Without a defense they came back faithfully." in found.reasons
    assert found.price[0] == "Test accuracy 80.0% (95 % interval over seeds 79.0% to 81.0%), without a defense 90.0%."
    assert "It gives no guarantee of differential privacy." in found.price
    assert any("someone who knows the defense" in caution for caution in found.cautions)
    assert not any("much accuracy" in caution for caution in found.cautions)
    assert [option.title for option in found.alternatives] == ["no defense", "clip"]


def test_a_high_price_and_its_guarantee_are_told() -> None:
    entries = [attack(psnr=40.0), attack(defense="dp"), utility("none", 0.9), utility("dp", 0.4, epsilon=3.0)]
    found = advice.advise(advice.options(rows(*entries), {rows(entries[-1])[0].key: 2.5}), "psnr", 1e-5)
    assert "It costs much accuracy" in found.cautions[0]
    assert "A step takes 2.50 times as long." in found.price
    assert "It guarantees every example epsilon 3 at delta 1e-05 over the whole training." in found.price


def test_accuracies_of_a_model_that_learned_nothing_are_no_price() -> None:
    entries = [attack(psnr=40.0), attack(defense="dp"), utility("none", 0.1), utility("dp", 0.1)]
    assert not any("most frequent class" in sentence for sentence in advised(*entries).cautions)
    entries[2] |= {"statuses": [NOTHING_LEARNED]}
    assert any("most frequent class" in sentence for sentence in advised(*entries).cautions)


def test_a_defense_that_was_tested_with_its_attacker_knowing_it_has_no_such_caution() -> None:
    informed = attack(defense="noise", threat="honest_but_curious +defense")
    found = advised(attack(psnr=40.0), attack(defense="noise", labels_leaked=1.0), informed)
    assert found.cautions == ("Labels still leak under it.",)
    assert "add [utility]" in found.price[0]


def test_nothing_is_recommended_that_is_not_enough_or_failed() -> None:
    found = advised(attack(psnr=40.0), attack(defense="clip", ssim=0.8))
    assert found.chosen is None
    assert found.headline == "Nothing that was tested is enough: even with clip, samples came back recognisable."
    broken = attack(defense="noise", outcomes={"done": 1, "failed": 1}, reasons=["out of memory"])
    assert advised(attack(psnr=40.0), broken).chosen is None
    assert advised(attack(outcomes={"failed": 1}, metrics={})).headline.startswith("No recommendation: cells failed")
    assert advised(captured()).headline.startswith("No recommendation: recorded updates")
    assert advised(attack(), attack(defense="noise", psnr=11.0), utility("none", 0.9)).headline.startswith(
        "No defense is needed"
    )


def test_what_was_not_tested_is_not_called_stopped() -> None:
    broken = attack(defense="noise", attack="idlg", outcomes={"failed": 2}, metrics={}, samples=0)
    said = verdict.headline(rows(attack(), attack(defense="noise"), broken, attack(defense="dp", psnr=40.0)), "psnr")
    assert said[0].startswith("Private samples came back faithfully (dense-inversion"), "a defense may leak more"
    assert said[1] == "Of 2 defenses tested, 0 stopped every attack that was tried."
    assert said[2].startswith("1 of 4 configurations have no result")
    nothing = attack(outcomes={"failed": 2}, metrics={}, samples=0)
    assert verdict.headline(rows(nothing), "psnr") == ("Nothing was tested: no cell of the audit has a result.",)


def test_attackers_are_told_apart_by_what_they_know() -> None:
    found = verdict.findings(
        rows(
            attack(defense="noise", threat="honest_but_curious +defense -batch_size", knowledge_used=["defense"]),
            attack(psnr=40.0, threat="eavesdropper"),
            attack(threat="somebody else"),
        ),
        "psnr",
    )
    assert [each.leak for each in found] == [Leak.FAITHFUL, Leak.GONE, Leak.GONE]
    assert found[0].who == "Someone who reads a client's traffic"
    assert found[1].who == "The server, following the protocol, also knowing the defense, not knowing the batch size"
    assert found[1].knowledge == (("dense-inversion", ("defense",)),)
    assert found[2].who == "Somebody else"
