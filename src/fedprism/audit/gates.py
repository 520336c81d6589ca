"""The gates that a pipeline stops at: `--fail-above psnr=15`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedprism.audit.summary import Summary, title
from fedprism.errors import BadInput
from fedprism.evaluation.severity import HIGHER_IS_CLOSER
from fedprism.metrics import METRICS
from fedprism.naming import nearest


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`--fail-above psnr=15`: no configuration's mean over samples and seeds may lie above.

    `max-psnr=15` is about the single sample that came back best.
    """

    metric: str
    limit: float
    single: bool = False

    def __str__(self) -> str:
        return f"{'max-' if self.single else ''}{self.metric}={self.limit:g}"

    def value(self, row: Summary) -> float | None:
        """What of a configuration the gate is about; None where it was not measured."""
        figure = row.figure(self.metric)
        return None if figure is None else figure.closest if self.single else figure.mean

    def tripped(self, row: Summary) -> float | None:
        """The value that is too high, or is no number; or None."""
        value = self.value(row)
        return value if value is not None and not value <= self.limit else None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What an audit says about a gate. A gate that nothing was measured for, or with a failed cell, is not passed."""

    gate: Gate
    worst: str | None
    """The configuration with the highest value."""
    value: float | None
    above: int
    """How many configurations lie above the limit."""
    failed_cells: int

    @property
    def passed(self) -> bool:
        return self.value is not None and not self.above and not self.failed_cells

    def as_dict(self) -> dict[str, Any]:
        return {
            "gate": str(self.gate),
            **vars(self.gate),
            "passed": self.passed,
            "worst": self.worst,
            "value": self.value,
            "above": self.above,
            "failed_cells": self.failed_cells,
        }


def parse_gate(text: str, metrics: Sequence[str]) -> Gate:
    """A gate from METRIC=VALUE, about one of these metrics."""
    name, equals, number = text.partition("=")
    single = name.startswith("max-")
    metric = name.removeprefix("max-")
    usable = [word for word in metrics if HIGHER_IS_CLOSER.get(word, False)]
    try:
        limit = float(number)
        if not equals or not math.isfinite(limit):
            raise ValueError
    except ValueError as error:
        raise BadInput(f"expected --fail-above METRIC=VALUE, found '{text}'; write psnr=15, for example.") from error
    if metric in METRICS and not HIGHER_IS_CLOSER[metric]:
        raise BadInput(
            f"expected a metric for --fail-above that is higher where more leaks, found {metric}, which is lower; use "
            f"{' or '.join(usable) or 'psnr'}."
        )
    if metric not in usable:
        hint = nearest(metric, usable) if usable else "add psnr to scores.metrics of the plan."
        raise BadInput(f"expected a metric of the plan for --fail-above, found '{metric}'; {hint}")
    return Gate(metric=metric, limit=limit, single=single)


def judged(rows: Sequence[Summary], gates: Sequence[Gate]) -> list[Judgement]:
    """Each gate with the configuration that comes closest to closing it, or lies farthest behind it."""
    attacks = [row for row in rows if row.cell["kind"] != "utility"]
    failed = sum(row.outcomes.get("failed", 0) for row in rows)
    judgements = []
    for gate in gates:
        values = [(value, row) for row in attacks if (value := gate.value(row)) is not None]
        value, worst = max(values, key=lambda pair: pair[0], default=(None, None))
        judgements.append(
            Judgement(
                gate=gate,
                worst=None if worst is None else title(worst.cell),
                value=value,
                above=sum(gate.tripped(row) is not None for row in attacks),
                failed_cells=failed,
            )
        )
    return judgements


def verdicts(rows: Sequence[Summary], gates: Sequence[Gate]) -> list[str]:
    """Why a pipeline should stop, one sentence each; none where it may go on.

    A cell that failed was not tested, and a gate that nothing was measured for was not passed.
    """
    sentences = []
    attacks = [row for row in rows if row.cell["kind"] != "utility"]
    for judgement in judged(rows, gates):
        gate = judgement.gate
        for row in attacks:
            value = gate.tripped(row)
            if value is not None:
                sentences.append(f"{title(row.cell)}: {gate.metric} {value:.4g} is above {gate.limit:g}.")
        if judgement.value is None:
            sentences.append(f"No cell has a value of {gate.metric}, so that {gate} says nothing.")
    failed = sum(row.outcomes.get("failed", 0) for row in rows)
    if gates and failed:
        sentences.append(f"{failed} cells failed, and what was not tested cannot pass.")
    return sentences
