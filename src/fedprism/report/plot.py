"""The numbers behind the interactive plot: those of results.json, as JSON that a page can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedprism.evaluation.severity import HIGHER_IS_CLOSER, TOKENS, Figure, Leak, number
from fedprism.evaluation.verdict import leak_of
from fedprism.report.advice import Option
from fedprism.report.configurations import Configuration, figure_in_words, label, settings

CAPS = {"psnr": 50.0, "mse": 0.3, **dict.fromkeys(("ssim", "columns", *TOKENS, "avd", "update-error"), 1.0)}
"""Values beyond are drawn at the edge: an exact reconstruction has infinitely many decibels."""


def data(
    rows: Sequence[Configuration], anchors: Mapping[str, str], choices: Sequence[Option], metrics: Sequence[str]
) -> dict[str, Any]:
    """Points, the metrics that can be the leakage, and what it can be drawn against."""
    costs = {(option.name, option.loss): option for option in choices}
    words = settings(rows)
    points = [
        _point(row, anchors[row.key], words[row.key], costs.get((row.cell.defense, row.cell.loss)), metrics)
        for row in rows
        if row.cell.kind != "utility" and any(name in row.metrics for name in metrics)
    ]
    axes = [{"name": "defense", "label": "defense", "kind": "words"}]
    if any(point["accuracy"] is not None for point in points):
        axes.insert(0, {"name": "accuracy", "label": "test accuracy", "kind": "share"})
    if any(point["epsilon"] is not None for point in points):
        axes.append({"name": "epsilon", "label": "epsilon (differential privacy)", "kind": "log"})
    return {
        "points": points,
        "axes": axes,
        "metrics": [
            {"name": name, "label": label(name), "higher": HIGHER_IS_CLOSER.get(name, False), "cap": CAPS.get(name)}
            for name in metrics
        ],
        "leaks": {leak.name.lower(): leak.value for leak in Leak},
    }


def _point(
    row: Configuration, anchor: str, setting: str, option: Option | None, metrics: Sequence[str]
) -> dict[str, Any]:
    cost = option.cost if option is not None else None
    return {
        "anchor": anchor,
        "attack": row.cell.attack,
        "threat": row.attacker,
        "defense": row.defense,
        "setting": setting,
        "leak": leak_of(row).name.lower(),
        "accuracy": None if cost is None else cost.accuracy,
        "interval": None if cost is None or cost.interval is None else list(cost.interval),
        "epsilon": None if cost is None else finite(cost.epsilon),
        "values": {name: _values(row.metrics[name]) for name in metrics if name in row.metrics},
        "words": {name: _words(name, row.metrics[name]) for name in metrics if name in row.metrics},
    }


def _values(figure: Figure) -> dict[str, float | str | None]:
    return {name: finite(value) for name, value in dataclasses.asdict(figure).items() if name != "by_seed"}


def _words(metric: str, figure: Figure) -> str:
    guess = "" if figure.baseline is None else f", a guess: {number(metric, figure.baseline)}"
    return f"{label(metric)} {figure_in_words(metric, figure)}{guess}"


def finite(value: float | None) -> float | str | None:
    """JSON has no infinity; the word is what results.json holds too."""
    return value if value is None or math.isfinite(value) else str(value)
