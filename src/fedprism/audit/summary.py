"""Means over seeds, and baselines beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedprism.audit.grid import configuration_key, situation_key, without_seed
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, RANGES, Figure, readable
from fedprism.evaluation.verdict import CeilingFigure, ceiling_figure
from fedprism.experiments import Outcome
from fedprism.utility import Interval, seed_interval


@dataclass(kw_only=True)
class Summary:
    """One configuration: runs that differ in nothing but the seed."""

    cell: dict[str, Any]
    outcomes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)
    statuses: dict[str, None] = field(default_factory=dict)
    means: dict[str, list[float]] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    residuals: list[float] = field(default_factory=list)
    """Of each seed, that of the update explained best."""
    updates: int = 0
    """How many updates were attacked one by one, with every seed."""
    explained: dict[tuple[str | None, int, int], float | None] = field(default_factory=dict)
    """Client, round and place in it of each update that its samples reproduce, and the least residual."""
    labels: list[bool] = field(default_factory=list)
    knowledge: frozenset[str] = frozenset()
    by_column: dict[str, list[float]] = field(default_factory=dict)
    samples: int = 0
    answered: int = 0
    """Private samples of all seeds, and for how many of them the attack returned something."""
    by_sample: list[dict[str, float]] = field(default_factory=list)
    """The scores of each private sample of all seeds; empty if nothing was returned for it."""
    accuracy: float | None = None
    accuracies: Sequence[float] = ()
    interval: Sequence[float] | None = None
    epsilon: float | None = None
    ceiling: CeilingFigure | None = None
    time_factor: float | None = None
    """By the clock: not part of results.json."""

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.state] = self.outcomes.get(outcome.state, 0) + 1
        if outcome.reason:
            self.reasons[outcome.reason] = None
        record = outcome.record
        if record is None:
            return
        self.statuses[record.status] = None
        self.knowledge = self.knowledge | set(record.knowledge_used)
        if record.residual is not None:
            self.residuals.append(record.residual)
        self._add_updates(record.updates)
        scores = record.scores or {}
        if record.kind == "utility":
            self.accuracy, self.epsilon = record.accuracy, record.epsilon
            self.interval, self.time_factor = scores.get("interval"), outcome.time_factor
            self.accuracies = scores.get("accuracy", ())
            return
        self.samples += scores.get("samples", 0)
        self.answered += scores.get("answered", 0)
        if scores.get("labels_match") is not None:
            self.labels.append(scores["labels_match"])
        for name, mean in scores.get("means", {}).items():
            if mean is not None:
                self.means.setdefault(name, []).append(mean)
        for name, values in scores.get("values", {}).items():
            present = [value for value in values if value is not None]
            best = max if HIGHER_IS_CLOSER.get(name, False) else min
            if present:
                self.closest[name] = best([*present, *([self.closest[name]] if name in self.closest else [])])
        self._add_samples(scores.get("values", {}))
        for name, value in scores.get("by_column", {}).items():
            self.by_column.setdefault(name, []).append(value)
        for baseline, means in outcome.baselines.items():
            for name, mean in means.items():
                if mean is not None:
                    self.baselines.setdefault(name, {}).setdefault(baseline, []).append(mean)

    def _add_samples(self, values: Mapping[str, Sequence[float | None]]) -> None:
        """The scores of each private sample, by metric."""
        for place in range(max(map(len, values.values()), default=0)):
            each = {name: column[place] for name, column in values.items() if place < len(column)}
            self.by_sample.append({name: value for name, value in each.items() if value is not None})

    def _add_updates(self, updates: Sequence[Mapping[str, Any]]) -> None:
        self.updates = max(self.updates, len(updates))
        for place, each in enumerate(updates):
            if each["recovered"]:
                key = (each["client"], each["round"], place)
                known = [value for value in (each["residual"], self.explained.get(key)) if value is not None]
                self.explained[key] = min(known, default=None)

    @property
    def situation(self) -> str:
        return situation_key(self.cell)

    @property
    def done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def failed(self) -> int:
        return self.outcomes.get("failed", 0)

    @property
    def residual(self) -> float | None:
        return min(self.residuals, default=None)

    @property
    def recovered(self) -> int:
        """How many private samples were recovered, at least recognisably."""
        metrics = self.metrics
        return sum(readable(scores, metrics) for scores in self.by_sample)

    @property
    def metrics(self) -> dict[str, Figure]:
        return {name: figure for name in self.means if (figure := self.figure(name)) is not None}

    def figure(self, metric: str) -> Figure | None:
        values = self.means.get(metric)
        if not values:
            return None
        interval = seed_interval(values, Interval(*RANGES.get(metric, (-math.inf, math.inf))))
        known = [_mean(each) for each in self.baselines.get(metric, {}).values()]
        best = max if HIGHER_IS_CLOSER.get(metric, False) else min
        return Figure(
            mean=_mean(values),
            low=None if interval is None else interval.low,
            high=None if interval is None else interval.high,
            closest=self.closest[metric],
            baseline=best(known) if known else None,
            by_seed=tuple(values),
        )

    def as_dict(self) -> dict[str, Any]:
        """Without the clock."""
        return {
            "configuration": self.cell,
            "outcomes": self.outcomes,
            "reasons": list(self.reasons),
            "statuses": list(self.statuses),
            "knowledge_used": sorted(self.knowledge),
            "metrics": {name: vars(figure) for name, figure in self.metrics.items()},
            "baselines": {name: {word: _mean(v) for word, v in each.items()} for name, each in self.baselines.items()},
            "by_column": {name: _mean(values) for name, values in self.by_column.items()},
            "samples": self.samples,
            "returned": self.answered,
            "recovered": self.recovered,
            "labels_leaked": _mean(list(map(float, self.labels))) if self.labels else None,
            "residual": self.residual,
            "updates": self.updates,
            "explained": [
                {"client": client, "round": round, "residual": residual}
                for (client, round, _), residual in self.explained.items()
            ],
            "accuracy": self.accuracy,
            "accuracies": self.accuracies,
            "interval": self.interval,
            "epsilon": self.epsilon,
            "ceiling": None if self.ceiling is None else vars(self.ceiling),
        }


def summarised(records: Iterable[Outcome]) -> list[Summary]:
    """One row per configuration, in the order of the grid, each with the ceiling of its setting."""
    rows: dict[str, Summary] = {}
    ceilings: dict[str, list[Mapping[str, Any] | None]] = {}
    for outcome in records:
        cell = dict(outcome.description)
        if cell["kind"] == "ceiling":
            bound = None if outcome.record is None else outcome.record.ceiling
            ceilings.setdefault(situation_key(cell), []).append(bound)
        else:
            rows.setdefault(configuration_key(cell), Summary(cell=without_seed(cell))).add(outcome)
    for row in rows.values():
        bounds = ceilings.get(row.situation, [])
        known = [bound for bound in bounds if bound is not None]
        row.ceiling = ceiling_figure(known) if len(known) == len(bounds) else None
    return list(rows.values())


def title(cell: Mapping[str, Any]) -> str:
    """A configuration in a line."""
    if cell["kind"] == "utility":
        return f"utility, {defense_title(cell)}, {cell['loss']}"
    if cell["kind"] == "capture":
        return f"{cell['attack']} on capture {cell['capture']}"
    subject = "ceiling" if cell["kind"] == "ceiling" else cell["attack"]
    clients = "1 client" if cell["clients"] == 1 else f"{cell['clients']} clients"
    protocol = str(cell["protocol"]).removesuffix("()")
    setting = (cell["threat"], defense_title(cell), f"{clients} of {cell['batch_size']}", protocol, cell["loss"])
    return ", ".join((subject, *map(str, setting)))


def situation_title(cell: Mapping[str, Any]) -> str:
    """A setting in a line: what stays the same for all attacks."""
    return title({**cell, "attack": "", "settings": ""}).removeprefix(", ").removeprefix(" on ")


def defense_title(cell: Mapping[str, Any]) -> str:
    """What a configuration is defended by; updates of a capture have what was done when they were recorded."""
    defense = cell.get("defense", "as recorded")
    return "no defense" if defense == "none" else str(defense)


def _mean(values: Sequence[float]) -> float:
    return math.inf if math.inf in values else math.fsum(values) / len(values)
