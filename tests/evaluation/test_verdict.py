"""The verdict: planted leaks, planted protections, and everything in between that must not reassure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from fedprism.evaluation.severity import Figure
from fedprism.evaluation.verdict import (
    PROTECTED_BELOW,
    CeilingFigure,
    Verdict,
    because,
    ceiling_figure,
    ceiling_of,
    inconclusive,
    verdict,
)


def bound(value: float, metric: str = "psnr") -> CeilingFigure:
    return CeilingFigure(metric=metric, value=value, confidence=0.95, prior="known up to noise of 0.1")


@dataclass(frozen=True, kw_only=True)
class Row:
    psnr: float = 12.0
    situation: str = "a"
    done: int = 2
    samples: int = 2
    answered: int = 2
    residual: float | None = 0.4
    explained: tuple[str, ...] = ()
    ceiling: CeilingFigure | None = None
    others: dict[str, Figure] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, Figure]:
        if not self.done or not self.samples:
            return {}
        figure = Figure(mean=self.psnr, low=None, high=None, closest=self.psnr, baseline=13.0)
        return {"psnr": figure, **self.others}


FAILED = Row(done=0, samples=0, answered=0, residual=None)
RECORDED = Row(samples=0, answered=0, residual=0.3)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row(psnr=40.0)], Verdict.LEAKS),
        ([Row(psnr=40.0, ceiling=bound(60.0))], Verdict.LEAKS),
        ([Row(), Row(psnr=math.inf)], Verdict.LEAKS),
        ([Row(ceiling=bound(15.9))], Verdict.PROTECTED),
        ([Row(ceiling=bound(15.9)), FAILED], Verdict.PROTECTED),
        ([Row(ceiling=bound(15.9)), Row(psnr=40.0, ceiling=bound(15.9))], Verdict.LEAKS),
        ([Row()], Verdict.INCONCLUSIVE),
        ([Row(residual=1e-9)], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(16.0))], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(math.inf))], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(0.1, "a metric without a threshold"))], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(0.1, "columns"))], Verdict.PROTECTED),
        ([Row(ceiling=bound(0.8, "columns"))], Verdict.INCONCLUSIVE),
        ([Row(psnr=14.5, ceiling=bound(14.0))], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(14.0)), Row(situation="b")], Verdict.INCONCLUSIVE),
        ([Row(ceiling=bound(14.0)), Row(situation="b", done=0)], Verdict.INCONCLUSIVE),
        ([Row(psnr=40.0), Row(situation="b", done=0)], Verdict.LEAKS),
        ([FAILED], Verdict.NOT_TESTED),
        ([Row(done=0, samples=0, ceiling=bound(5.0))], Verdict.NOT_TESTED),
        ([], Verdict.NOT_TESTED),
        ([RECORDED], Verdict.INCONCLUSIVE),
        ([Row(samples=0, answered=0, residual=0.05)], Verdict.LEAKS),
        ([Row(samples=0, answered=0, residual=0.051)], Verdict.INCONCLUSIVE),
        ([Row(samples=0, answered=0, residual=None)], Verdict.INCONCLUSIVE),
        ([Row(samples=0, answered=0, residual=0.4, explained=("one client's",))], Verdict.LEAKS),
    ],
)
def test_floors_and_ceilings_are_read_together(rows: list[Row], expected: Verdict) -> None:
    assert verdict(rows) is expected


def test_a_ceiling_that_an_attack_exceeds_is_no_bound() -> None:
    rows = [Row(ceiling=bound(14.0)), Row(psnr=14.5, ceiling=bound(14.0))]
    assert ceiling_of(rows) is None
    assert "scored above the ceiling" in because(rows)


def test_the_evidence_is_named() -> None:
    assert "residual of 0.4" in because([Row(residual=0.9), Row()])
    assert "no ceiling is known" in because([Row()])
    assert "other samples" in because([Row(residual=0.01)])
    assert "the ceiling is 28.0 dB (95% confidence)" in because([Row(ceiling=bound(28.0))])
    assert because([Row(ceiling=bound(12.0))]) == (
        "No attacker gets more than 12.0 dB (95% confidence) on average, assuming known up to noise of 0.1."
    )


def test_settings_without_evidence_are_counted_once() -> None:
    assert len(inconclusive([Row(), Row(), Row(situation="b", psnr=40.0), Row(situation="c", done=0)])) == 2


def test_the_ceiling_of_several_seeds_is_the_highest_and_needs_every_number() -> None:
    one = {"metric": "psnr", "values": [10.0, 12.0], "confidence": 0.95, "prior": "p", "status": "s"}
    assert ceiling_figure([one, {**one, "values": [11.0], "confidence": 0.9}]) == CeilingFigure(
        metric="psnr", value=12.0, confidence=0.9, prior="p", status="s", unbounded=0.0
    )
    loose = ceiling_figure([{**one, "values": [12.0, 15.9, 16.0, math.inf]}])
    assert loose is not None
    assert loose.unbounded == 0.5, "two of four samples have a bound that is no protection"
    assert ceiling_figure([]) is None
    assert ceiling_figure([one, {**one, "values": [math.nan]}]) is None
    assert ceiling_figure([{**one, "values": []}]) is None
    assert set(PROTECTED_BELOW) == {"psnr", "columns"}
