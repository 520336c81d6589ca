"""The verdict of an audit: what attacks got (a floor) and what no attacker can exceed (a ceiling), read together.

This is the one rule for the report, summary.md, the terminal and the exit code. A failed attack is never protection.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict

from fedprism.display import html
from fedprism.evaluation.residuals import EXPLAINED_RESIDUAL
from fedprism.evaluation.severity import (
    RECOGNISABLE_COLUMNS,
    TOKENS,
    Figure,
    Leak,
    number,
    severity,
    worst,
)

PROTECTED_BELOW = {"psnr": 16.0, "columns": RECOGNISABLE_COLUMNS}
"""Ceilings below these count as protection. Decibels: of 60 embedded photographs (32 px), blurred until their SSIM is
that of a recognisable one, 19 of 20 have more. Columns: what is called a recognisable row."""


class _InNotebooks:
    """Apart from the enumeration, whose own body may hold no name of this form."""

    def _repr_html_(self: Any) -> str:
        """The word and what it means, for notebooks."""
        return html.lines([html.paragraph(f"{self.value.upper()}: {MEANING[self]}.")])


class Verdict(_InNotebooks, StrEnum):
    """What an audit shows, worst first. Only PROTECTED is good news."""

    LEAKS = "leaks"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested"
    PROTECTED = "protected"


MEANING = {
    Verdict.LEAKS: "an attack recovered private samples",
    Verdict.INCONCLUSIVE: "no tested attack succeeded, but a better one may",
    Verdict.NOT_TESTED: "no attack ran to completion",
    Verdict.PROTECTED: "a mathematical bound shows that no attacker can recover more, under its assumptions",
}
"""Each verdict in a sentence."""


@dataclass(frozen=True, kw_only=True)
class CeilingFigure:
    """What no attacker can exceed in one setting: the highest bound over samples and seeds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    metric: str
    value: float
    confidence: float
    prior: str
    """What the bound assumes that the attacker knows beforehand."""
    status: str = ""
    unbounded: float = 1.0
    """Share of the private samples whose own bound is no protection."""

    @property
    def low(self) -> bool:
        """Whether it shows protection."""
        return self.value < PROTECTED_BELOW.get(self.metric, -math.inf)

    @property
    def known(self) -> bool:
        """Whether it bounds anything; its status says why not."""
        return math.isfinite(self.value)

    def __str__(self) -> str:
        return f"{number(self.metric, self.value)} ({self.confidence:.0%} confidence)"


class Row(Protocol):
    """One attack in one setting, over its seeds."""

    @property
    def situation(self) -> Hashable: ...
    @property
    def done(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def answered(self) -> int: ...
    @property
    def residual(self) -> float | None: ...
    @property
    def explained(self) -> Collection[Any]: ...
    @property
    def metrics(self) -> Mapping[str, Figure]: ...
    @property
    def ceiling(self) -> CeilingFigure | None: ...


def ceiling_figure(ceilings: Sequence[Mapping[str, Any]]) -> CeilingFigure | None:
    """The highest bound of all seeds; None if there is none, or one of them is no number."""
    values = [value for each in ceilings for value in each["values"]]
    if not values or any(value is None or math.isnan(value) for value in values):
        return None
    highest = max(ceilings, key=lambda each: max(each["values"], default=-math.inf))
    return CeilingFigure(
        metric=highest["metric"],
        value=max(values),
        confidence=min(each["confidence"] for each in ceilings),
        prior=highest["prior"],
        status=highest["status"],
        unbounded=sum(value >= PROTECTED_BELOW.get(highest["metric"], -math.inf) for value in values) / len(values),
    )


def leak_of(row: Row) -> Leak:
    """How much one attack recovered."""
    if not row.done:
        return Leak.UNTESTED
    if not row.metrics and not row.samples:
        explained = row.explained or (row.residual is not None and row.residual <= EXPLAINED_RESIDUAL)
        return Leak.EXPLAINED if explained else Leak.UNKNOWN
    return severity(row.metrics, all_answered=row.answered == row.samples)


def verdict(rows: Iterable[Row]) -> Verdict:
    """What all attacks and the ceiling of each setting say together; settings that differ in verdict leave it open."""
    each = {_verdict_of_one(members) for members in situations(rows)} or {Verdict.NOT_TESTED}
    if Verdict.LEAKS in each:
        return Verdict.LEAKS
    return each.pop() if len(each) == 1 else Verdict.INCONCLUSIVE


def situations(rows: Iterable[Row]) -> list[list[Any]]:
    """Rows that differ in nothing but the attack, together: they share a ceiling."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.situation, []).append(row)
    return list(groups.values())


def inconclusive(rows: Iterable[Row]) -> list[list[Any]]:
    """The settings in which nothing was recovered and nothing shows protection."""
    open_ones = (Verdict.INCONCLUSIVE, Verdict.NOT_TESTED)
    return [members for members in situations(rows) if _verdict_of_one(members) in open_ones]


def _verdict_of_one(rows: Sequence[Row]) -> Verdict:
    leak = worst(map(leak_of, rows))
    if any(leak_of(row).readable or leak_of(row) is Leak.EXPLAINED for row in rows):
        return Verdict.LEAKS
    if leak is Leak.UNTESTED:
        return Verdict.NOT_TESTED
    ceiling = ceiling_of(rows)
    return Verdict.PROTECTED if ceiling is not None and ceiling.low else Verdict.INCONCLUSIVE


def ceiling_of(rows: Sequence[Row]) -> CeilingFigure | None:
    """The ceiling of one setting. One that an attack exceeded is no bound and counts as unknown.

    Rows of tables are judged by their columns and texts by their tokens, which a ceiling in decibels does not bound.
    """
    ceiling = next((row.ceiling for row in rows if row.ceiling is not None), None)
    counted = {name for row in rows for name in ("columns", *TOKENS) if name in row.metrics}
    if ceiling is None or counted - {ceiling.metric}:
        return None
    return None if any(exceeds(row, ceiling) for row in rows) else ceiling


def loosest(groups: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """The setting with the highest ceiling; an unknown one is higher than any other."""

    def height(rows: Sequence[Row]) -> float:
        ceiling = ceiling_of(rows)
        return math.inf if ceiling is None else ceiling.value

    return max(groups, key=height)


def exceeds(row: Row, ceiling: CeilingFigure) -> bool:
    """Whether an attack scores above the ceiling on average, which must not happen."""
    figure = row.metrics.get(ceiling.metric)
    return figure is not None and figure.mean > ceiling.value


def because(rows: Sequence[Row]) -> str:
    """The evidence for the verdict on one setting, in a sentence."""
    reached = _verdict_of_one(rows)
    if reached in (Verdict.LEAKS, Verdict.NOT_TESTED):
        return f"{MEANING[reached].capitalize()}."
    ceiling = ceiling_of(rows)
    if ceiling is not None and ceiling.low:
        return f"No attacker gets more than {ceiling} on average, assuming {ceiling.prior.rstrip('.')}."
    return f"{_attacks_failed(rows)}; {_ceiling_is_open(rows, ceiling)}."


def _attacks_failed(rows: Sequence[Row]) -> str:
    residuals = [row.residual for row in rows if row.done and row.residual is not None]
    if not residuals:
        return "The tested attacks recovered too little"
    least = min(residuals)
    if least <= EXPLAINED_RESIDUAL:
        return f"The best answer reproduces the update (residual {least:.2g}) with other samples"
    return f"The tested attacks failed (the best leaves a residual of {least:.2g}; 0 = update fully explained)"


def _ceiling_is_open(rows: Sequence[Row], ceiling: CeilingFigure | None) -> str:
    if ceiling is not None and not ceiling.known:
        return (ceiling.status[:1].lower() + ceiling.status[1:].rstrip(".")) or "no ceiling is known"
    if ceiling is not None:
        return f"the ceiling is {ceiling}, so a better attack may succeed"
    if any(row.ceiling is not None and exceeds(row, row.ceiling) for row in rows):
        return "an attack scored above the ceiling, so the ceiling is not used"
    return "no ceiling is known, so a better attack may recover more"
