"""What leaks, to whom, under which assumptions: sentences made of what was measured and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedprism.evaluation.severity import OWN_CHECKS, Leak, worst
from fedprism.report.advice import Advice, closeness
from fedprism.report.configurations import NO_DEFENSE, Configuration, figure_in_words, label, measured, number
from fedprism.report.judging import judge
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
    """What one attacker got, at best over all attacks."""

    threat: str
    who: str
    assumptions: str
    leak: Leak
    sentence: str
    knowledge: tuple[tuple[str, tuple[str, ...]], ...]
    """What each attack made use of."""


def attacks_of(rows: Sequence[Configuration]) -> list[Configuration]:
    return [row for row in rows if row.cell.kind != "utility"]


def overall(rows: Sequence[Configuration]) -> Leak:
    """The worst of all configurations."""
    return worst(map(judge, attacks_of(rows)))


def headline(rows: Sequence[Configuration], metric: str) -> tuple[str, ...]:
    """The audit in a few sentences."""
    attacks = attacks_of(rows)
    leak = overall(rows)
    if leak is Leak.UNTESTED:
        return ("Nothing was tested: no cell of the audit has a result.",)
    if not leak.judged:
        return _without_truth(attacks, leak)
    top = _top(attacks, leak, metric)
    where = "Without a defense, private" if top.bare else "Private"
    sentences = [f"{where} samples {leak}{_example(top, metric)}."]
    sentences += [*_about_defenses(attacks), *_about_labels(attacks)]
    untested = sum(judge(row) is Leak.UNTESTED for row in attacks)
    if untested:
        sentences.append(
            f"{untested} of {_count(len(attacks), 'configuration')} have no result: see what was not tested."
        )
    return tuple(sentences)


def findings(rows: Sequence[Configuration], metric: str) -> tuple[AttackerVerdict, ...]:
    """One finding an attacker, the worst first."""
    groups: dict[str, list[Configuration]] = {}
    for row in attacks_of(rows):
        groups.setdefault(row.attacker, []).append(row)
    verdicts = [_verdict_on(threat, members, metric) for threat, members in groups.items()]
    return tuple(sorted(verdicts, key=lambda each: list(Leak).index(each.leak)))


def _verdict_on(threat: str, rows: Sequence[Configuration], metric: str) -> AttackerVerdict:
    leak = overall(rows)
    top = _top(rows, leak, metric)
    if leak is Leak.UNTESTED:
        sentence = "No cell has a result."
    elif not leak.judged:
        sentence = _without_truth(rows, leak)[0]
    else:
        sentence = f"{'Without a defense, samples' if top.bare else 'Samples'} {leak}{_example(top, metric, by=False)}."
    knowledge: dict[str, set[str]] = {}
    for row in rows:
        knowledge.setdefault(row.cell.attack, set()).update(row.knowledge_used)
    return AttackerVerdict(
        threat=threat,
        who=who(threat),
        assumptions=assumptions(threat),
        leak=leak,
        sentence=sentence,
        knowledge=tuple((name, tuple(sorted(fields))) for name, fields in knowledge.items()),
    )


def who(threat: str) -> str:
    """An attacker in plain words; what it is granted beyond its kind, or denied, is said."""
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
    skipped: int,
    seeds: Sequence[int],
    serious: Sequence[str] = (),
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A short summary for a data-protection impact assessment: headings, each with its sentences.

    `serious` is what recordings show about their protocol.
    """
    attacks = attacks_of(rows)
    methods = list(dict.fromkeys(row.cell.attack for row in attacks))
    threats = list(dict.fromkeys(who(row.attacker) for row in attacks))
    defenses = list(dict.fromkeys(row.defense for row in attacks if row.cell.defense != NO_DEFENSE))
    named = ", ".join(defenses)
    failed = sum(row.failed for row in rows)
    tested = (
        f"{system(plan)} {_count(len(methods), 'attack')} ({', '.join(methods)}) in "
        f"{_count(len(attacks), 'configuration')}, each with {_count(len(seeds), 'seed')}; "
        f"{_count(len(defenses), 'defense')}{f' ({named})' if 0 < len(defenses) <= MOST_NAMED else ''}."
    )
    assumed = [f"{name}." for name in threats]
    assumed.append("What each of them knows stands in the table of attackers.")
    model = plan.get("model")
    if isinstance(model, Mapping) and model.get("name") and not model.get("weights"):
        assumed.append("Weights were drawn at random, as before the first round; trained weights may leak differently.")
    sentences = [*headline(attacks, next(iter(measured(attacks, plan)), "")), *serious]
    residual = [advice.headline, *advice.reasons[:1], *advice.cautions]
    residual.append(
        "A stronger attacker than those tested may get further. Whether someone was in the data, and what the "
        "finished model gives away, was not the question of this audit."
    )
    left_out = [
        f"{_count(skipped, 'combination')} left out and {_count(failed, 'cell')} failed; both are listed with reasons."
    ]
    return (
        ("What was tested", (tested,)),
        ("Assumptions about attackers", tuple(assumed)),
        ("Findings", tuple(sentences)),
        ("Residual risk", tuple(residual)),
        ("Not covered", tuple(left_out)),
    )


def system(plan: Mapping[str, Any]) -> str:
    """What was audited, in a sentence."""
    captures, model, data = (plan.get(key) for key in ("captures", "model", "data"))
    if isinstance(captures, Mapping):
        folders = captures.get("folders")
        return f"Recorded updates ({_count(len(folders) if isinstance(folders, list) else 0, 'capture')})."
    name = (model.get("name") or model.get("factory")) if isinstance(model, Mapping) else None
    source = (
        next((data[key] for key in ("name", "folder", "npz", "csv") if data.get(key)), None)
        if isinstance(data, Mapping)
        else None
    )
    return f"The model {name or 'of the plan'} trained on {source or 'the data of the plan'}, simulated."


def _top(rows: Sequence[Configuration], leak: Leak, metric: str) -> Configuration:
    """The configuration that shows a leak best: without a defense if there is one, the closest by the metric."""
    return max((row for row in rows if judge(row) is leak), key=lambda row: (row.bare, closeness(row, metric)))


def _about_defenses(rows: Sequence[Configuration]) -> list[str]:
    """Which stopped everything. One with a failed cell did not: what was not tested cannot pass."""
    defenses: dict[str, list[Configuration]] = {}
    for row in rows:
        if row.cell.defense != NO_DEFENSE:
            defenses.setdefault(row.defense, []).append(row)
    if not defenses:
        return []
    stopped = [
        name
        for name, members in defenses.items()
        if worst(map(judge, members)) is Leak.GONE and not any(row.failed for row in members)
    ]
    named = f": {', '.join(stopped)}" if 0 < len(stopped) <= MOST_NAMED else ""
    return [f"Of {_count(len(defenses), 'defense')} tested, {len(stopped)} stopped every attack that was tried{named}."]


def _example(row: Configuration, metric: str, by: bool = True) -> str:
    """The evidence behind a sentence, in brackets."""
    words = [row.cell.attack]
    if by:
        words.append(f"by {row.attacker}")
    if metric in row.metrics:
        figure = row.metrics[metric]
        words.append(f"mean {label(metric)} {figure_in_words(metric, figure)}")
        if figure.null is not None:
            words.append(f"a guess: {number(metric, figure.null)}")
    return f" ({', '.join(words)})"


def _about_labels(rows: Sequence[Configuration]) -> list[str]:
    with_labels = [row for row in rows if row.labels_leaked is not None]
    if not with_labels:
        return []
    always = sum(row.labels_leaked == 1 for row in with_labels)
    some = sum((row.labels_leaked or 0) > 0 for row in with_labels)
    if not some:
        return ["Labels did not leak."]
    return [
        f"Labels leaked in {some} of {_count(len(with_labels), 'configuration')}, in {always} of them with every seed."
    ]


def _without_truth(rows: Sequence[Configuration], leak: Leak) -> tuple[str, ...]:
    """What can be said of recordings: whether what came out of them accounts for them."""
    best = min((row for row in rows if judge(row) is leak), key=lambda row: _inf(row.residual))
    where = f"{best.cell.attack} on capture {best.cell.capture}"
    left = "" if best.residual is None else f" leaves {best.residual:.3g} of it unexplained"
    if leak is Leak.EXPLAINED:
        checks = [str(check) for check in OWN_CHECKS if any(check in status for status in best.statuses)]
        reasons = "; ".join(([f"it{left}"] if left else []) + checks)
        return (
            f"What was recovered accounts for recorded updates ({where}: {reasons}).",
            "The truth is not known, so that nothing was compared; treat it as the private samples all the same.",
        )
    return (
        "What was recovered cannot be compared: the truth behind these recordings is not known.",
        *([f"{where}{left}; near 0, what was recovered would account for all of it."] if left else []),
    )


def _inf(value: float | None) -> float:
    return float("inf") if value is None else value


def _count(number_: int, word: str) -> str:
    return f"{number_} {word}{'' if number_ == 1 else 's'}"
