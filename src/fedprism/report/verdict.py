"""What leaks, to whom, under which assumptions: sentences made of what was measured and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedprism.audit.grid import situation_key
from fedprism.audit.system import PARTLY, RANDOM, system
from fedprism.evaluation.residuals import READ_AS_SGD
from fedprism.evaluation.severity import Leak, number, worst
from fedprism.evaluation.verdict import MEANING, Verdict, because, inconclusive, leak_of, loosest, situations, verdict
from fedprism.naming import counted
from fedprism.report.advice import Advice, closeness
from fedprism.report.configurations import (
    NO_DEFENSE,
    Configuration,
    ExplainedUpdate,
    figure_in_words,
    label,
    measured,
)
from fedprism.threats import THREATS

WHO = {
    "eavesdropper": "Someone who reads a client's traffic",
    "honest_but_curious": "The server, following the protocol",
    "curious_client": "Another participant",
    "secure_aggregation": "The server, seeing sums only",
    "malicious_server": "A server that tampers with the model it sends",
}
"""Threat models as people."""
MOST_NAMED = 8
"""Longer lists are counted, not read out."""


@dataclass(frozen=True, kw_only=True)
class AttackerVerdict:
    """What one attacker recovered, at best over all attacks, and could recover at most."""

    threat: str
    who: str
    assumptions: str
    verdict: Verdict
    sentence: str
    knowledge: tuple[tuple[str, tuple[str, ...]], ...]
    """What each attack made use of."""


def attacks_of(rows: Sequence[Configuration]) -> list[Configuration]:
    return [row for row in rows if row.cell.kind != "utility"]


def headline(rows: Sequence[Configuration], metric: str, weights: str) -> tuple[str, ...]:
    """The audit in a few sentences."""
    attacks = attacks_of(rows)
    first = in_a_sentence(rows, metric, weights)
    if verdict(attacks) is Verdict.NOT_TESTED:
        return (first,)
    settings = counted(len(situations(attacks)), "setting")
    counts = [
        f"{len(members)} of {settings} {'is' if len(members) == 1 else 'are'} {said}."
        for said, members in ((Verdict.PROTECTED, _protected(attacks)), (Verdict.INCONCLUSIVE, inconclusive(attacks)))
        if members
    ]
    untested = sum(leak_of(row) is Leak.UNTESTED for row in attacks)
    if untested:
        counts.append(f"{untested} of {counted(len(attacks), 'configuration')} have no result.")
    return (first, *notes(rows), *_about_defenses(attacks), *_about_labels(attacks), *counts)


def in_a_sentence(rows: Sequence[Configuration], metric: str, weights: str) -> str:
    """The audit in one sentence: who recovered how much, or why nothing can be said."""
    attacks = attacks_of(rows)
    reached = verdict(attacks)
    if reached is Verdict.NOT_TESTED:
        return "Nothing was tested: no attack ran to completion."
    leaks = [leak_of(row) for row in attacks]
    if any(leak.readable for leak in leaks):
        return _recovered(leading(attacks, metric))
    if reached is Verdict.LEAKS or not worst(leaks).judged:
        return _without_truth(attacks, Leak.EXPLAINED if Leak.EXPLAINED in leaks else worst(leaks))[0]
    if reached is Verdict.PROTECTED:
        return because(loosest(situations(attacks)))
    return f"With {weights}, {MEANING[reached]}: {because(loosest(inconclusive(attacks)))}"


def notes(rows: Sequence[Configuration]) -> tuple[str, ...]:
    """What the sentence rests on, if there is no ground truth to compare with."""
    attacks = attacks_of(rows)
    leaks = [leak_of(row) for row in attacks]
    if Leak.EXPLAINED not in leaks or any(leak.readable for leak in leaks):
        return ()
    return tuple(_without_truth(attacks, Leak.EXPLAINED)[1:])


def leading(rows: Sequence[Configuration], metric: str) -> Configuration:
    """The configuration that shows best what leaks: without a defense if one leaks, then the largest share."""
    leak = worst(map(leak_of, rows))
    leaking = [row for row in rows if leak_of(row) is leak or (leak.readable and leak_of(row).readable)]

    def telling(row: Configuration) -> tuple[bool, float, int, float]:
        part, whole = row.share or (0, 1)
        return row.bare, part / max(whole, 1), part, closeness(row, metric)

    return max(leaking, key=telling)


def _recovered(row: Configuration) -> str:
    defended = " without a defense" if row.bare else "" if row.cell.kind == "capture" else f" despite {row.defense}"
    pause = "," if "," in who(row.attacker) else ""
    return (
        f"{who(row.attacker)}{pause} recovered {row.recovered} of {counted(row.samples, 'private sample')}"
        f"{defended}, with the attack {row.cell.attack}."
    )


def findings(rows: Sequence[Configuration], metric: str, weights: str) -> tuple[AttackerVerdict, ...]:
    """One finding per attacker, the worst first."""
    groups: dict[str, list[Configuration]] = {}
    for row in attacks_of(rows):
        groups.setdefault(row.attacker, []).append(row)
    verdicts = [_verdict_on(threat, members, metric, weights) for threat, members in groups.items()]
    return tuple(sorted(verdicts, key=lambda each: list(Verdict).index(each.verdict)))


def _verdict_on(threat: str, rows: Sequence[Configuration], metric: str, weights: str) -> AttackerVerdict:
    knowledge: dict[str, set[str]] = {}
    for row in rows:
        knowledge.setdefault(row.cell.attack, set()).update(row.knowledge_used)
    return AttackerVerdict(
        threat=threat,
        who=who(threat),
        assumptions=assumptions(threat),
        verdict=verdict(rows),
        sentence=" ".join(_findings_of(rows, metric, weights, explained=verdict(rows) is not Verdict.LEAKS)),
        knowledge=tuple((name, tuple(sorted(fields))) for name, fields in knowledge.items()),
    )


def _findings_of(rows: Sequence[Configuration], metric: str, weights: str, *, explained: bool = True) -> list[str]:
    """The worst leak, or why nothing can be said; then what the ceilings show."""
    leak = worst(map(leak_of, rows))
    under = f"With {weights}"
    sentences = []
    if leak is Leak.UNTESTED:
        return [f"{MEANING[Verdict.NOT_TESTED].capitalize()}."]
    if leak.judged:
        top = _top(rows, leak, metric)
        where = " and no defense" if top.bare else ""
        sentences.append(f"{under}{where}, private samples {leak}{_example(top, metric)}.")
    else:
        sentences += _without_truth(rows, leak)
    for said, members in ((Verdict.PROTECTED, _protected(rows)), (Verdict.INCONCLUSIVE, inconclusive(rows))):
        if members:
            why = f" {because(loosest(members))}" if explained else ""
            sentences.append(f"{under}, {said} settings: {len(members)} of {len(situations(rows))}.{why}")
    return sentences


def _protected(rows: Sequence[Configuration]) -> list[Any]:
    return [members for members in situations(rows) if verdict(members) is Verdict.PROTECTED]


def who(threat: str) -> str:
    """An attacker in plain words, with what it is granted beyond its kind, or denied."""
    name, changes = (threat.split() or [""])[0], threat.split()[1:]
    if name not in WHO:
        return threat[:1].upper() + threat[1:]
    more = [change[1:].replace("_", " ") for change in changes if change.startswith("+")]
    less = [change[1:].replace("_", " ") for change in changes if change.startswith("-")]
    extra = [f"also knowing the {' and the '.join(more)}"] if more else []
    extra += [f"not knowing the {' and the '.join(less)}"] if less else []
    return ", ".join([WHO[name], *extra])


def assumptions(threat: str) -> str:
    """What the threat model is, in the words of its table."""
    name = (threat.split() or [""])[0]
    return THREATS[name].summary if name in THREATS else "Has the recorded update and what is stored beside it."


def assessment(
    rows: Sequence[Configuration],
    advice: Advice,
    plan: Mapping[str, Any],
    weights: str,
    skipped: int,
    seeds: Sequence[int],
    serious: Sequence[str] = (),
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A short summary for a data-protection impact assessment: headings, each with its sentences.

    `serious` is what recordings show about their protocol.
    """
    attacks = attacks_of(rows)
    ran = [row for row in attacks if row.done]  # what was refused or failed was not tested
    methods = list(dict.fromkeys(row.cell.attack for row in ran))
    threats = list(dict.fromkeys(who(row.attacker) for row in ran))
    defenses = list(dict.fromkeys(row.defense for row in ran if row.cell.defense != NO_DEFENSE))
    failed, refused = sum(row.failed for row in rows), sum(row.outcomes.get("skipped", 0) for row in rows)
    named = f" ({', '.join(methods)})" if methods else ""
    tested = (
        f"{system(plan, weights)} {counted(len(methods), 'attack')}{named} in "
        f"{counted(len(ran), 'configuration')}, each with {counted(len(seeds), 'seed')}; "
        f"{counted(len(defenses), 'defense')}{_named(defenses)}."
    )
    assumed = [f"{name}." for name in threats]
    assumed.append("The appendix lists what each of them knows.")
    if weights in (RANDOM, PARTLY):
        assumed.append(f"The model had {weights}, as before the first round; trained weights may leak differently.")
    sentences = [*headline(attacks, next(iter(measured(attacks, plan)), ""), weights), *serious]
    residual = [advice.headline, *(advice.reasons[:1] if advice.chosen else ()), *advice.cautions]
    residual.append(
        "An attacker that was not tested may recover more, up to the ceiling where one is stated. Membership in the "
        "data, and what the finished model reveals, were not examined."
    )
    numbers = (counted(skipped, "combination"), counted(refused, "run"), counted(failed, "run"))
    left_out = ["{} left out; {} could not start and {} failed. The appendix lists them with reasons.".format(*numbers)]
    return (
        ("Tested", (tested,)),
        ("Assumptions about attackers", tuple(assumed)),
        ("Findings", tuple(sentences)),
        ("Residual risk", tuple(residual)),
        ("Not covered", tuple(left_out)),
    )


def _top(rows: Sequence[Configuration], leak: Leak, metric: str) -> Configuration:
    """The configuration that shows a leak best: without a defense if there is one, the closest by the metric."""
    return max((row for row in rows if leak_of(row) is leak), key=lambda row: (row.bare, closeness(row, metric)))


def _about_defenses(rows: Sequence[Configuration]) -> list[str]:
    """What each defense stopped: only an attack that succeeds without it counts. A failed cell stops nothing."""
    bare = {_without_defense(row): row for row in rows if row.bare}
    defended = [row for row in rows if row.cell.kind == "attack" and not row.bare]
    succeeding = [row for row in defended if (other := bare.get(_without_defense(row))) and leak_of(other).readable]
    names = list(dict.fromkeys(row.defense for row in defended))
    if not names:
        return []
    if not succeeding:
        return ["No attack succeeds without a defense, so the audit does not show that any defense stops one."]
    hold = {row.defense for row in succeeding}
    broken = {row.defense for row in defended if leak_of(row).readable or row.failed or not row.done}
    rescaling = {row.defense for row in defended if _only_rescales(row)}
    stopped = [name for name in names if name in hold - broken - rescaling]
    said = f"Of {counted(len(names), 'defense')}, {len(stopped)} stopped every attack that succeeds without it"
    return [f"{said}{_named(stopped)}. That is not protection: only a ceiling shows it." if stopped else f"{said}."]


def _only_rescales(row: Configuration) -> bool:
    """Whether one client's update was only multiplied by a number, which hides nothing: an attack failed by chance."""
    return row.cell.clients == 1 and all(part.partition("(")[0] == "clip" for part in row.cell.defense.split(" + "))


def _without_defense(row: Configuration) -> tuple[str, ...]:
    """The same attack in the same setting without a defense, and without knowing one."""
    cell = row.cell.model_dump() | {"defense": NO_DEFENSE, "defense_settings": ""}
    cell["threat"] = " ".join(word for word in row.cell.threat.split() if word != "+defense")
    return (row.cell.attack, row.cell.settings, situation_key(cell))


def _example(row: Configuration, metric: str) -> str:
    """The evidence behind a sentence, in brackets."""
    words = [row.cell.attack, f"by {row.attacker}"]
    if metric in row.metrics:
        figure = row.metrics[metric]
        words.append(f"mean {label(metric)} {figure_in_words(metric, figure)}")
        if figure.baseline is not None:
            words.append(f"a guess: {number(metric, figure.baseline)}")
    return f" ({', '.join(words)})"


def _about_labels(rows: Sequence[Configuration]) -> list[str]:
    with_labels = [row for row in rows if row.labels_leaked is not None]
    some = sum((row.labels_leaked or 0) > 0 for row in with_labels)
    always = sum(row.labels_leaked == 1 for row in with_labels)
    if not some:
        return ["No tested attack recovered the labels."] if with_labels else []
    tested = counted(len(with_labels), "configuration")
    return [f"Labels leaked in {some} of {tested}{f', in {always} of them with every seed' if always else ''}."]


def _without_truth(rows: Sequence[Configuration], leak: Leak) -> list[str]:
    """What can be said of recordings: whether the recovered samples reproduce them, and whose update."""
    best = min((row for row in rows if leak_of(row) is leak), key=lambda row: _inf(row.residual))
    where = f"attack {best.cell.attack}, capture {best.cell.capture}"
    left = "" if best.residual is None else f"residual {best.residual:.3g}; 0 = update fully explained"
    if leak is not Leak.EXPLAINED:
        why = "; ".join(filter(None, [where, left]))
        return [f"The recovered samples cannot be compared: the ground truth of these captures is not known ({why})."]
    counts = f"{len(best.explained)} of {counted(best.updates, 'recorded update')}"
    reproduced = counts if best.explained else "recorded updates"
    said = [
        f"The recovered samples reproduce {reproduced} ({where}{f', {left}' if left else ''}){_whose(best.explained)}.",
        "The ground truth is not known, so nothing was compared: treat them as the private samples.",
    ]
    if any(READ_AS_SGD in status for status in best.statuses):
        said.append(f"This rests on an assumption: {READ_AS_SGD}.")
    return said


def _whose(updates: Sequence[ExplainedUpdate]) -> str:
    """The clients whose updates these are, the best explained first, if there are names."""
    named = sorted((each for each in updates if each.client is not None), key=lambda each: _inf(each.residual))
    listed = [
        f"{each.client} in round {each.round} "
        f"({'confirmed by parts of the update' if each.residual is None else f'residual {each.residual:.3g}'})"
        for each in named[:MOST_NAMED]
    ]
    more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return f": {', '.join([*listed, *more])}" if listed else ""


def _inf(value: float | None) -> float:
    return math.inf if value is None else value


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    return f" ({', '.join(listed)})" if 0 < len(listed) <= MOST_NAMED else ""
