"""How much came back in a configuration of an audit."""

from __future__ import annotations

from fedprism.evaluation.severity import Leak, explains, severity
from fedprism.report.configurations import Configuration


def judge(row: Configuration) -> Leak:
    """How much came back in one configuration."""
    if not row.done:
        return Leak.UNTESTED
    if not row.metrics and not row.samples:
        return Leak.EXPLAINED if explains(row.statuses, row.residual) else Leak.UNKNOWN
    return severity(row.metrics, all_answered=row.answered == row.samples)
