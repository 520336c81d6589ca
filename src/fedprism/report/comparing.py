"""What changed between two audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fedprism.audit import Audit
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, Figure, Leak
from fedprism.evaluation.verdict import leak_of, verdict
from fedprism.report.configurations import Configuration, configurations, measured, settings
from fedprism.report.page import shared, template
from fedprism.report.verdict import attacks_of

MOST_DEEP = 8
"""Tables within tables of a plan that are compared key by key."""


class Change(StrEnum):
    """How a configuration fares now, seen by the owners of the data."""

    WORSE = "leaks more"
    BETTER = "leaks less"
    SAME = "no clear change"
    IDENTICAL = "the same numbers"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One configuration in both audits."""

    before: Configuration
    after: Configuration
    change: Change
    was: Leak
    now: Leak


@dataclass(frozen=True, kw_only=True)
class Comparison:
    pairs: tuple[Pair, ...]
    costs: tuple[tuple[Configuration, Configuration], ...]
    added: tuple[Configuration, ...]
    removed: tuple[Configuration, ...]
    settings: tuple[tuple[str, str, str], ...]
    """Keys of the plan that differ, with their value before and after."""

    def count(self, change: Change) -> int:
        return sum(pair.change is change for pair in self.pairs)


def compare(before: Audit, after: Audit) -> Comparison:
    """Configurations are the same if everything but the seeds is."""
    old = {row.key: row for row in configurations(before)}
    new = {row.key: row for row in configurations(after)}
    both = [(old[key], new[key]) for key in new if key in old]
    metrics = measured([*old.values(), *new.values()], after.plan)
    pairs = [_paired(a, b, metrics) for a, b in both if a.cell.kind != "utility"]
    order = list(Change).index
    return Comparison(
        pairs=tuple(sorted(pairs, key=lambda pair: order(pair.change))),
        costs=tuple((a, b) for a, b in both if a.cell.kind == "utility"),
        added=tuple(row for key, row in new.items() if key not in old),
        removed=tuple(row for key, row in old.items() if key not in new),
        settings=tuple(_differences(_whole(before), _whole(after))),
    )


def _whole(audit: Audit) -> dict[str, Any]:
    """The plan, and in a few letters what its data and weights are: files may change under the same name."""
    return {**audit.plan, **{f"content of {name}": digest for name, digest in audit.fingerprint.items()}}


def headline(comparison: Comparison) -> tuple[str, ...]:
    """The comparison in a few sentences."""
    if not comparison.pairs:
        return ("The two audits have no configuration in common.",)
    total, worse, better = len(comparison.pairs), comparison.count(Change.WORSE), comparison.count(Change.BETTER)
    identical = comparison.count(Change.IDENTICAL)
    if identical == total:
        return (f"All {total} shared configurations have the same numbers.",)
    sentences = [f"Of {total} shared configurations {worse} leak more and {better} leak less than before."]
    if identical:
        sentences.append(f"{identical} have the same numbers.")
    if comparison.count(Change.SAME):
        sentences.append(f"{comparison.count(Change.SAME)} show no clear change.")
    return tuple(sentences)


def render_comparison(before: Audit, after: Audit) -> str:
    """The page of a comparison."""
    comparison = compare(before, after)
    rows = [row for pair in comparison.pairs for row in (pair.before, pair.after)]
    metrics = measured(rows, after.plan)
    page: str = template("comparison.html.j2").render(
        titles=_titles(before, after),
        comparison=comparison,
        headline=headline(comparison),
        verdicts=tuple(verdict(attacks_of(configurations(audit))) for audit in (before, after)),
        metrics=metrics,
        settings=settings(rows),
        added=attacks_of(comparison.added),
        removed=attacks_of(comparison.removed),
        Change=Change,
        **shared(),
    )
    return page


def _titles(*audits: Audit) -> tuple[str, ...]:
    """What the audits are called; with their folders, where that is the same."""
    titles = tuple(str(audit.plan.get("title") or audit.root.resolve().name) for audit in audits)
    if len(set(titles)) == len(titles):
        return titles
    return tuple(f"{title} ({audit.root.resolve().name})" for title, audit in zip(titles, audits, strict=True))


def _paired(before: Configuration, after: Configuration, metrics: Sequence[str]) -> Pair:
    was, now = leak_of(before), leak_of(after)
    return Pair(before=before, after=after, was=was, now=now, change=_change(before, after, was, now, metrics))


def _change(before: Configuration, after: Configuration, was: Leak, now: Leak, metrics: Sequence[str]) -> Change:
    """What is said of the samples decides; below that the metrics whose intervals over seeds do not overlap."""
    same = all(getattr(before, name) == getattr(after, name) for name in ("metrics", "labels_leaked", "residual"))
    if same and was is now:
        return Change.IDENTICAL
    recorded = {was, now} <= {Leak.EXPLAINED, Leak.UNKNOWN}
    if was is not now and ((was.judged and now.judged) or recorded):
        order = list(Leak).index
        return Change.WORSE if order(now) < order(was) else Change.BETTER
    signs = [
        _direction(name, before.metrics[name], after.metrics[name])
        for name in metrics
        if name in before.metrics and name in after.metrics
    ]
    if any(sign > 0 for sign in signs) and not any(sign < 0 for sign in signs):
        return Change.WORSE
    if any(sign < 0 for sign in signs) and not any(sign > 0 for sign in signs):
        return Change.BETTER
    return Change.SAME


def _direction(metric: str, before: Figure, after: Figure) -> int:
    """1 where the second is closer to the private samples beyond both intervals, -1 where it is farther, else 0."""
    if before.range is None or after.range is None:
        return 0
    rises = after.range[0] > before.range[1]
    falls = after.range[1] < before.range[0]
    sign = 1 if HIGHER_IS_CLOSER.get(metric, False) else -1
    return sign * (int(rises) - int(falls))


def _differences(before: Any, after: Any, path: str = "", depth: int = 0) -> list[tuple[str, str, str]]:
    """Keys whose values differ, as deep as tables go."""
    if isinstance(before, Mapping) and isinstance(after, Mapping) and depth < MOST_DEEP:
        return [
            each
            for key in {**before, **after}
            if before.get(key) != after.get(key)
            for each in _differences(before.get(key), after.get(key), f"{path}.{key}", depth + 1)
        ]
    return [(path.removeprefix("."), str(before), str(after))] if before != after else []
