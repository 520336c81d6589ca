"""The configurations of an audit, as results.json states them. Nothing is computed anew here: numbers are only shown.

A folder may come from anywhere, so that every entry is checked before a page is made of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedprism.audit import Audit
from fedprism.audit.grid import configuration_key, situation_key
from fedprism.audit.summary import title as title_of
from fedprism.errors import BadInput
from fedprism.evaluation.severity import NOT_LEAKAGE, TOKENS, Figure, number
from fedprism.evaluation.verdict import CeilingFigure

LABELS = {
    **{"psnr": "PSNR", "ssim": "SSIM", "mse": "MSE", "avd": "AVD"},
    **{"columns": "columns right", "tokens": "tokens right", "tokens-in-place": "tokens right in their places"},
}
"""Names of metrics in the report, where they differ from those in plans."""
NO_DEFENSE = "none"
MOST_NAME = 1000
"""Characters of a client's name: what a recording may hold."""
SETTING = ("clients", "batch_size", "protocol", "loss")


Count = Annotated[int, Field(ge=0, le=2**53)]


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class TestedSetting(_Shown):
    """What was tested. Which fields are there depends on the kind."""

    kind: Literal["attack", "capture", "utility"]
    attack: str = ""
    settings: str = ""
    threat: str = ""
    defense: str = NO_DEFENSE
    defense_settings: str = ""
    clients: Count = 1
    batch_size: Count = 0
    protocol: str = ""
    loss: str = ""
    capture: str = ""


class ExplainedUpdate(_Shown):
    """A recorded update that the samples read off it reproduce."""

    client: Annotated[str, Field(max_length=MOST_NAME)] | None
    round: int
    residual: float | None


class Configuration(_Shown):
    """Runs that differ in nothing but the seed."""

    key: str
    situation: str
    """The same for all attacks in one setting, which share a ceiling."""
    cell: Annotated[TestedSetting, Field(validation_alias="configuration")]
    outcomes: dict[str, Count]
    reasons: tuple[str, ...]
    statuses: tuple[str, ...]
    knowledge_used: tuple[str, ...]
    metrics: dict[str, Figure]
    baselines: dict[str, dict[str, float]]
    by_column: dict[str, float]
    samples: Count
    answered: Annotated[Count, Field(validation_alias="returned")]
    recovered: Count = 0
    """How many samples were recovered, at least recognisably."""
    labels_leaked: float | None
    residual: float | None
    updates: Count = 0
    """How many updates were attacked one by one."""
    explained: tuple[ExplainedUpdate, ...] = ()
    """Those that the samples read off them reproduce."""
    accuracy: float | None
    accuracies: tuple[float, ...] = ()
    """Of each seed."""
    interval: tuple[float, float] | None
    epsilon: float | None
    ceiling: CeilingFigure | None = None

    @property
    def title(self) -> str:
        return title_of(self.cell.model_dump())

    @property
    def share(self) -> tuple[int, int] | None:
        """How many of the private samples were recovered or, without ground truth, of the updates reproduced."""
        if not self.done:
            return None
        if self.samples:
            return self.recovered, self.samples
        return (len(self.explained), self.updates) if self.updates else None

    @property
    def bare(self) -> bool:
        """Whether it is known that there was no defense; of a capture it is not."""
        return self.cell.kind == "attack" and self.cell.defense == NO_DEFENSE

    @property
    def defense(self) -> str:
        if self.cell.kind == "capture":
            return "as recorded"
        return "no defense" if self.cell.defense == NO_DEFENSE else self.cell.defense

    @property
    def attacker(self) -> str:
        """The threat model's name; whoever holds a capture knows what is in it."""
        return self.cell.threat or "whoever holds the capture"

    @property
    def done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def failed(self) -> int:
        return self.outcomes.get("failed", 0)


def configurations(audit: Audit) -> tuple[Configuration, ...]:
    """Every configuration of the audit, in the order of its grid."""
    try:
        if not isinstance(audit.plan, Mapping) or not all(isinstance(each, Mapping) for each in audit.skipped):
            raise TypeError
        return tuple(map(_configuration, audit.summary))
    except (ValidationError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise BadInput(
            "results.json was not written by fedprism audit, or was changed since. Run the audit again."
        ) from error


def _configuration(entry: Mapping[str, Any]) -> Configuration:
    """Strictly, as JSON: there lists become tuples without words becoming numbers."""
    keys = {"key": configuration_key(entry["configuration"]), "situation": situation_key(entry["configuration"])}
    return Configuration.model_validate_json(json.dumps({**entry, **keys}))


def measured(rows: Sequence[Configuration], plan: Mapping[str, Any]) -> list[str]:
    """The metrics that say how much leaked, the most telling first."""
    scores = plan.get("scores")
    wanted = scores.get("metrics") if isinstance(scores, Mapping) else None
    names = ["columns", *TOKENS, *(wanted if isinstance(wanted, list) else []), "update-error"]
    there = {name for row in rows for name in row.metrics}
    ordered = dict.fromkeys([*(str(name) for name in names), *sorted(there)])
    return [name for name in ordered if name in there and name != NOT_LEAKAGE]


def settings(rows: Sequence[Configuration]) -> dict[str, str]:
    """What each configuration is beside attack, attacker and defense, in a few words: what differs between them."""
    differing = _differing(rows)
    return {row.key: _setting(row, differing) for row in rows}


def shared_setting(rows: Sequence[Configuration]) -> str:
    """What is the same in all simulated configurations."""
    simulated = [row for row in rows if row.cell.kind == "attack"]
    return _setting(simulated[0], set(SETTING) - _differing(rows)) if simulated else ""


def _differing(rows: Sequence[Configuration]) -> set[str]:
    simulated = [row.cell for row in rows if row.cell.kind == "attack"]
    return {name for name in SETTING if len({getattr(cell, name) for cell in simulated}) > 1}


def _setting(row: Configuration, names: Collection[str]) -> str:
    cell = row.cell
    if cell.kind == "capture":
        return f"capture {cell.capture}"
    words = {
        "clients": f"{cell.clients} client{'' if cell.clients == 1 else 's'}",
        "batch_size": f"batches of {cell.batch_size}",
        "protocol": cell.protocol,
        "loss": cell.loss,
    }
    return ", ".join(words[name] for name in SETTING if name in names)


def label(metric: str) -> str:
    return LABELS.get(metric, metric)


def figure_in_words(metric: str, figure: Figure | None) -> str:
    """The mean with its interval, or the values of the seeds."""
    if figure is None:
        return ""
    return " ".join(filter(None, (number(metric, figure.mean), interval(metric, figure))))


def accuracy_in_words(cost: Configuration) -> str:
    """The mean test accuracy with its interval, or the values of the seeds."""
    if cost.accuracy is None:
        return ""
    if cost.interval is not None:
        return f"{cost.accuracy:.1%} (95% interval {cost.interval[0]:.1%} to {cost.interval[1]:.1%})"
    seeds = f" ({', '.join(f'{value:.1%}' for value in cost.accuracies)})" if len(cost.accuracies) > 1 else ""
    return f"{cost.accuracy:.1%}{seeds}"


def interval(metric: str, figure: Figure | None) -> str:
    """The 95% interval over seeds or, of too few seeds, their values, in brackets and without the unit."""
    if figure is None:
        return ""
    if figure.low is not None and figure.high is not None:
        words = f"({number(metric, figure.low)} to {number(metric, figure.high)})"
    else:
        seeds = [number(metric, value) for value in figure.by_seed]
        words = f"({', '.join(seeds)})" if len(set(seeds)) > 1 else ""
    return words.replace(" dB", "")
