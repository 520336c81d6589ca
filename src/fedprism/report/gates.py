"""The conclusion of an audit as its report shows it: the verdict and the checks that were asked for."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedprism.audit import Audit
from fedprism.errors import BadInput
from fedprism.evaluation.severity import number
from fedprism.evaluation.verdict import Verdict
from fedprism.report.configurations import label


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class GateLine(_Shown):
    """A check and its result, as results.json states them."""

    flag: str
    metric: str
    limit: float
    single: bool
    kind: Literal["above", "below", "ceiling-above"]
    passed: bool
    worst: str | None
    value: float | None
    why: tuple[str, ...]

    @property
    def rule(self) -> str:
        """What was asked for."""
        limit = number(self.metric, self.limit)
        if self.kind == "ceiling-above":
            return f"ceiling at most {limit}"
        bound = f"{label(self.metric)}{' of the best-recovered sample' if self.single else ''}"
        return f"{'' if self.single else 'mean '}{bound} at {'most' if self.kind == 'above' else 'least'} {limit}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """Why it failed, or what comes closest to the limit."""
        closest = () if self.value is None else (f"Worst: {number(self.metric, self.value)}, {self.worst}.",)
        return self.why or closest


class Concluded(_Shown):
    """The verdict, which is not computed again here, and the checks; failed ones first."""

    verdict: Verdict
    weights: str
    gates: Annotated[tuple[GateLine, ...], Field(validation_alias="checks")]


def concluded(audit: Audit) -> Concluded:
    """The conclusion that the audit's command came to."""
    try:
        shown = Concluded.model_validate_json(json.dumps(audit.conclusion))
    except (ValidationError, TypeError, ValueError) as error:
        raise BadInput("results.json has no conclusion as fedprism audit writes it. Run the audit again.") from error
    return shown.model_copy(update={"gates": tuple(sorted(shown.gates, key=lambda line: line.passed))})
