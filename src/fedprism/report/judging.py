"""From numbers to words: how much came back of private samples, judged by the sample that fared worst for its owner."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from fedprism.audit.summary import HIGHER_IS_CLOSER
from fedprism.demo import FAITHFUL_PSNR, RECOGNISABLE_SSIM, TRACES_SSIM
from fedprism.report.configurations import NOT_LEAKAGE, Configuration, Figure
from fedprism.solvers.dense import DenseStatus
from fedprism.solvers.exact_batch import ExactStatus

FAITHFUL_MSE = 10 ** (-FAITHFUL_PSNR / 10)
"""The same as FAITHFUL_PSNR, for plans that ask for the error only."""
FAITHFUL_UPDATE, RECOGNISABLE_UPDATE, TRACES_UPDATE = 0.01, 0.1, 0.5
"""Relative errors of a client's update that was split off a sum."""
RECOGNISABLE_COLUMNS = 0.8
"""The share of a row's columns."""
EXPLAINED_RESIDUAL = 0.05
"""The part of an update that may be left unexplained by what is said to account for it."""
OWN_CHECKS = (DenseStatus.EXACT, DenseStatus.AGREED, ExactStatus.EXACT, ExactStatus.CONFIRMED)
"""Statuses of answers that an update bears out by itself, of a closed form and without any search."""


class Leak(StrEnum):
    """How much came back, worst for its owner first. The value is what is said of the samples."""

    FAITHFUL = "came back faithfully"
    RECOGNISABLE = "came back recognisable"
    TRACES = "came back in traces"
    GONE = "did not come back"
    EXPLAINED = "account for recorded updates"
    UNKNOWN = "cannot be told without the truth"
    UNTESTED = "was not tested"

    @property
    def readable(self) -> bool:
        return self in (Leak.FAITHFUL, Leak.RECOGNISABLE)

    @property
    def judged(self) -> bool:
        """Whether it was compared with the truth."""
        return self not in (Leak.EXPLAINED, Leak.UNKNOWN, Leak.UNTESTED)


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
        return Leak.EXPLAINED if explains(row) else Leak.UNKNOWN
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


def explains(row: Configuration) -> bool:
    """Whether what came out of a recording accounts for it: by the residual, or by a check of the attack's own."""
    checked = any(sentence in status for status in row.statuses for sentence in OWN_CHECKS)
    return checked or (row.residual is not None and row.residual <= EXPLAINED_RESIDUAL)


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
