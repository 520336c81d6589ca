"""From numbers to words: how much came back of private samples, judged by the sample that fared worst for its owner."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from fedprism.audit.summary import HIGHER_IS_CLOSER
from fedprism.demo import FAITHFUL_PSNR, RECOGNISABLE_SSIM, TRACES_SSIM
from fedprism.report.configurations import NOT_LEAKAGE, Configuration, Figure

FAITHFUL_MSE = 10 ** (-FAITHFUL_PSNR / 10)
"""The same as FAITHFUL_PSNR, for plans that ask for the error only."""
FAITHFUL_UPDATE, RECOGNISABLE_UPDATE, TRACES_UPDATE = 0.01, 0.1, 0.5
"""Relative errors of a client's update that was split off a sum."""
RECOGNISABLE_COLUMNS = 0.8
"""The share of a row's columns."""


class Leak(StrEnum):
    """How much came back, worst for its owner first. The value is what is said of the samples."""

    FAITHFUL = "came back faithfully"
    RECOGNISABLE = "came back recognisable"
    TRACES = "came back in traces"
    GONE = "did not come back"
    UNKNOWN = "cannot be told without the truth"
    UNTESTED = "was not tested"

    @property
    def readable(self) -> bool:
        return self in (Leak.FAITHFUL, Leak.RECOGNISABLE)

    @property
    def judged(self) -> bool:
        return self not in (Leak.UNKNOWN, Leak.UNTESTED)


def worst(leaks: Iterable[Leak]) -> Leak:
    """The worst for the owners of the data."""
    return min(leaks, key=list(Leak).index, default=Leak.UNTESTED)


def judge(row: Configuration) -> Leak:
    """How much came back in one configuration.

    A single sample that came back is a leak, so that the closest one counts and not the mean. What a guess would score
    as well is no leak.
    """
    if not row.done:
        return Leak.UNTESTED
    if not row.metrics and not row.samples:
        return Leak.UNKNOWN
    metrics = {name: figure for name, figure in row.metrics.items() if name != NOT_LEAKAGE}
    if _faithful(metrics):
        return Leak.FAITHFUL
    if _recognisable(metrics):
        return Leak.RECOGNISABLE
    # Means are over what was answered, a guess's over all samples: they compare only where all were answered.
    comparable = row.answered == row.samples
    if _in_traces(metrics) or (comparable and any(_beyond_guess(name, f) for name, f in metrics.items())):
        return Leak.TRACES
    return Leak.GONE


def _faithful(metrics: dict[str, Figure]) -> bool:
    return (
        _closest(metrics, "psnr", FAITHFUL_PSNR)
        or _closest(metrics, "mse", FAITHFUL_MSE)
        or _closest(metrics, "columns", 1.0)
        or _closest(metrics, "update-error", FAITHFUL_UPDATE)
    )


def _recognisable(metrics: dict[str, Figure]) -> bool:
    return (
        _closest(metrics, "ssim", RECOGNISABLE_SSIM, margin=TRACES_SSIM)
        or _closest(metrics, "columns", RECOGNISABLE_COLUMNS, margin=0.1)
        or _closest(metrics, "update-error", RECOGNISABLE_UPDATE)
    )


def _in_traces(metrics: dict[str, Figure]) -> bool:
    return _closest(metrics, "ssim", TRACES_SSIM, margin=TRACES_SSIM) or _closest(
        metrics, "update-error", TRACES_UPDATE
    )


def _closest(metrics: dict[str, Figure], name: str, limit: float, margin: float = 0.0) -> bool:
    """Whether the closest sample reaches `limit`, and is better than a guess by more than `margin`."""
    if name not in metrics:
        return False
    figure = metrics[name]
    sign = 1 if HIGHER_IS_CLOSER.get(name, False) else -1
    reached = sign * figure.closest >= sign * limit
    return reached and (figure.null is None or sign * (figure.closest - figure.null) > margin)


def _beyond_guess(name: str, figure: Figure) -> bool:
    """Whether the mean, with its whole interval where there is one, is better than the best guess."""
    if figure.null is None:
        return False
    if HIGHER_IS_CLOSER.get(name, False):
        return (figure.mean if figure.low is None else figure.low) > figure.null
    return (figure.mean if figure.high is None else figure.high) < figure.null
