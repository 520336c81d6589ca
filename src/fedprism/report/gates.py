"""The gates of an audit as its report tells them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from fedprism.audit import Audit
from fedprism.errors import BadInput
from fedprism.report.configurations import label, number


class GateLine(BaseModel):
    """A gate and what came of it, as results.json states them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gate: str
    metric: str
    limit: float
    single: bool
    passed: bool
    worst: str | None
    value: float | None
    above: int
    failed_cells: int

    @property
    def rule(self) -> str:
        """What was asked for."""
        name, limit = label(self.metric), number(self.metric, self.limit)
        return f"{name} of the closest sample at most {limit}" if self.single else f"mean {name} at most {limit}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """Why it is passed or closed."""
        if self.value is None:
            return ("No cell has a value of it, so that the gate says nothing.",)
        sentences = [f"Highest: {number(self.metric, self.value)}, {self.worst}."]
        if self.above:
            sentences.append(f"{self.above} configuration{'s lie' if self.above > 1 else ' lies'} above.")
        if self.failed_cells:
            cells = "1 cell" if self.failed_cells == 1 else f"{self.failed_cells} cells"
            sentences.append(f"{cells} failed, and what was not tested cannot pass.")
        return tuple(sentences)


def gate_lines(audit: Audit) -> tuple[GateLine, ...]:
    """The gates that the audit was run with; the closed ones first."""
    try:
        lines = [GateLine.model_validate(dict(each)) for each in audit.gates]
    except (ValidationError, TypeError, ValueError) as error:
        raise BadInput(
            "expected gates in results.json as fedprism audit writes them, found others; run the audit again."
        ) from error
    return tuple(sorted(lines, key=lambda line: line.passed))
