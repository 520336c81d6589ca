"""Words for numbers: the one place that says what recovered, recognisable and traces mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from fedprism.metrics import METRICS

TOKENS = ("tokens", "tokens-in-place")
"""Shares of whole numbers that were recovered: anywhere, and in their places."""
HIGHER_IS_CLOSER = {
    **{name: metric.higher_is_better for name, metric in METRICS.items()},
    "columns": True,
    **dict.fromkeys(TOKENS, True),
}
"""For every metric of a sample, whether a higher value is closer to the original."""
NOT_LEAKAGE = "avd_floor"
"""A reference value of AVD, the same for every attack."""

RANGES = {
    "ssim": (-1.0, 1.0),
    **dict.fromkeys(("columns", *TOKENS), (0.0, 1.0)),
    **dict.fromkeys(("mse", "update-error"), (0.0, math.inf)),
}
"""The values that are possible: an interval over seeds ends there."""

FAITHFUL_PSNR = 30.0
"""Decibels from which a copy can hardly be told from the original beside it."""
FAITHFUL_MSE = 10 ** (-FAITHFUL_PSNR / 10)
"""The same as FAITHFUL_PSNR, for plans that ask for the error only."""
FAITHFUL_UPDATE = 0.01
"""Relative error of a client's update that was split off a sum."""
FAITHFUL_COLUMNS = 1.0
"""Share of a row's columns: all of them."""
FAITHFUL_TOKENS = 1.0
"""Share of a sample's whole numbers in their places: all of them."""
RECOGNISABLE_SSIM = 0.5
"""Structural similarity from which a person recognises what is shown."""
RECOGNISABLE_UPDATE = 0.1
"""Relative error of an update."""
RECOGNISABLE_COLUMNS = 0.8
"""Share of a row's columns."""
RECOGNISABLE_COLUMNS_MARGIN = 0.1
"""Share of columns by which a recognisable row must beat a guess."""
RECOGNISABLE_TOKENS = 0.8
"""Share of a sample's whole numbers, wherever they stand: as of a table's row."""
RECOGNISABLE_TOKENS_MARGIN = 0.1
"""Share of whole numbers by which a recognisable sample must beat a guess: common words are in every text."""
TRACES_SSIM = 0.2
"""Structural similarity of traces, and by how much traces and more must beat a guess."""
TRACES_UPDATE = 0.5
"""Relative error of an update."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric of one configuration: the mean over seeds of the mean over samples."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    mean: float
    low: float | None
    """95% interval over seeds, inside the metric's range; None for fewer than five seeds."""
    high: float | None
    closest: float
    """Of the sample that came closest to its original."""
    baseline: float | None
    """The best mean score of the baselines, which know nothing of the update."""
    by_seed: tuple[float, ...] = ()
    """The mean of each seed: shown where there are too few for an interval."""

    @property
    def range(self) -> tuple[float, float] | None:
        """The interval over seeds or, of fewer than five, from the lowest to the highest; None for one seed."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return (min(self.by_seed), max(self.by_seed)) if len(self.by_seed) > 1 else None


class Leak(StrEnum):
    """How much was recovered, worst for its owner first. The value is what is said of the samples."""

    FAITHFUL = "were recovered"
    RECOGNISABLE = "were recovered recognisably"
    TRACES = "were recovered in traces"
    GONE = "were not recovered"
    EXPLAINED = "reproduce recorded updates"
    UNKNOWN = "cannot be compared without the ground truth"
    UNTESTED = "were not tested"

    @property
    def readable(self) -> bool:
        return self in (Leak.FAITHFUL, Leak.RECOGNISABLE)

    @property
    def judged(self) -> bool:
        """Whether it was compared with the ground truth."""
        return self not in (Leak.EXPLAINED, Leak.UNKNOWN, Leak.UNTESTED)


def worst(leaks: Iterable[Leak]) -> Leak:
    """The worst for the owners of the data."""
    return min(leaks, key=list(Leak).index, default=Leak.UNTESTED)


def severity(metrics: Mapping[str, Figure], *, all_answered: bool) -> Leak:
    """How much was recovered, by the closest sample: a single recovered sample is a leak.

    What a guess would score as well is no leak. all_answered: whether the attack returned something for every sample;
    means are over what was answered, a guess's over all samples, so they compare only then.
    """
    leaking = {name: figure for name, figure in metrics.items() if name != NOT_LEAKAGE}
    if _faithful(leaking):
        return Leak.FAITHFUL
    if _recognisable(leaking):
        return Leak.RECOGNISABLE
    if _in_traces(leaking) or (all_answered and any(_beyond_guess(name, f) for name, f in leaking.items())):
        return Leak.TRACES
    return Leak.GONE


def readable(scores: Mapping[str, float], metrics: Mapping[str, Figure]) -> bool:
    """Whether one sample was recovered, at least recognisably, by its own scores; `metrics` hold the baselines."""
    own = {
        name: replace(metrics[name], mean=value, low=None, high=None, closest=value, by_seed=())
        for name, value in scores.items()
        if name in metrics
    }
    return severity(own, all_answered=False).readable


def _faithful(metrics: Mapping[str, Figure]) -> bool:
    return (
        _closest(metrics, "psnr", FAITHFUL_PSNR)
        or _closest(metrics, "mse", FAITHFUL_MSE)
        or _closest(metrics, "columns", FAITHFUL_COLUMNS)
        or _closest(metrics, "tokens-in-place", FAITHFUL_TOKENS, margin=RECOGNISABLE_TOKENS_MARGIN)
        or _closest(metrics, "update-error", FAITHFUL_UPDATE)
    )


def _recognisable(metrics: Mapping[str, Figure]) -> bool:
    return (
        _closest(metrics, "ssim", RECOGNISABLE_SSIM, margin=TRACES_SSIM)
        or _closest(metrics, "columns", RECOGNISABLE_COLUMNS, margin=RECOGNISABLE_COLUMNS_MARGIN)
        or _closest(metrics, "tokens", RECOGNISABLE_TOKENS, margin=RECOGNISABLE_TOKENS_MARGIN)
        or _closest(metrics, "update-error", RECOGNISABLE_UPDATE)
    )


def _in_traces(metrics: Mapping[str, Figure]) -> bool:
    return _closest(metrics, "ssim", TRACES_SSIM, margin=TRACES_SSIM) or _closest(
        metrics, "update-error", TRACES_UPDATE
    )


def _closest(metrics: Mapping[str, Figure], name: str, limit: float, margin: float = 0.0) -> bool:
    """Whether the closest sample reaches `limit`, and is better than a guess by more than `margin`."""
    if name not in metrics:
        return False
    figure = metrics[name]
    sign = 1 if HIGHER_IS_CLOSER.get(name, False) else -1
    reached = sign * figure.closest >= sign * limit
    return reached and (figure.baseline is None or sign * (figure.closest - figure.baseline) > margin)


def _beyond_guess(name: str, figure: Figure) -> bool:
    """Whether the mean, with its whole range over seeds, is better than the best guess."""
    if figure.baseline is None:
        return False
    low, high = figure.range or (figure.mean, figure.mean)
    return low > figure.baseline if HIGHER_IS_CLOSER.get(name, False) else high < figure.baseline


def number(metric: str, value: float | None) -> str:
    """A value as a person reads it, with its unit."""
    if value is None:
        return ""
    if metric in ("columns", *TOKENS):
        return f"{value:.0%}"
    if metric == "psnr":
        return "∞ dB" if math.isinf(value) and value > 0 else f"{value:.1f} dB"
    return f"{value:.3g}"
