"""The picture of an audit: one dot per defense, its accuracy against the share of samples that can be recovered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedprism.report.advice import Option

WIDE, NARROW = 720, 340
"""Widths in pixels: on a screen and on a phone, which shows the other drawing."""
LEFT, TOP, BOTTOM = 56, 16, 52
"""Margins in pixels: room for the numbers of the axes and their titles."""
LABELLED = 0.64
"""Share of the width after which the labels begin."""
GAP = 20
"""Pixels between the labels of two defenses."""
LETTER = 7.2
"""Pixels per letter of a label: longer ones are cut."""
LEAST_HEIGHT = 250
"""In pixels."""
PADDING = 0.02
"""Accuracy beyond the lowest and the highest that the axis shows."""
STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
"""Accuracy between two numbers of the axis: the first that needs at most MOST_TICKS of them."""
MOST_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A defense in the picture. Places are in pixels from the upper left corner."""

    title: str
    label: str
    tone: str
    floor: float
    ceiling: float
    height: float
    label_height: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All that a drawing needs."""

    width: int
    height: int
    left: float
    right: float
    bottom: float
    labels: float
    marks: tuple[Mark, ...]
    shares: tuple[tuple[float, str], ...]
    accuracies: tuple[tuple[float, str], ...]
    """Places and numbers of the axes; no accuracies if none was measured."""


def picture(options: Sequence[Option], width: int) -> Picture | None:
    """The defenses that were tested; None if none was."""
    shown = [option for option in options if option.floor is not None]
    if not shown:
        return None
    height = max(LEAST_HEIGHT, TOP + BOTTOM + GAP * len(shown))
    bottom, right = height - BOTTOM, round(width * LABELLED)
    measured = [option.accuracy for option in shown if option.accuracy is not None]
    low, high = (min(measured) - PADDING, max(measured) + PADDING) if measured else (0.0, 1.0)
    floor = bottom - GAP if measured and len(measured) < len(shown) else bottom  # room for those without an accuracy

    def across(share: float) -> float:
        return LEFT + share * (right - LEFT)

    def upwards(accuracy: float) -> float:
        return floor - (accuracy - low) / (high - low) * (floor - TOP)

    heights = [
        (upwards(option.accuracy) if option.accuracy is not None else bottom - GAP / 2)
        if measured
        else TOP + (place + 0.5) * (bottom - TOP) / len(shown)
        for place, option in enumerate(shown)
    ]
    labels = _apart(heights, TOP, bottom)
    letters = int((width - right - GAP) / LETTER)
    return Picture(
        width=width,
        height=height,
        left=LEFT,
        right=right,
        bottom=bottom,
        labels=right + GAP,
        marks=tuple(
            _mark(option, across, at, label_at, letters)
            for option, at, label_at in zip(shown, heights, labels, strict=True)
        ),
        shares=tuple((across(quarter / 4), f"{quarter / 4:.0%}") for quarter in range(0, 5, 2 if width < WIDE else 1)),
        accuracies=tuple((upwards(value), f"{100 * value:.3g}%") for value in _ticks(low, high)) if measured else (),
    )


def in_words(options: Sequence[Option]) -> str:
    """What the picture shows, for those who do not see it."""
    return " ".join(f"{_words(option)}." for option in options if option.floor is not None)


def _mark(option: Option, across: Callable[[float], float], at: float, label_at: float, letters: int) -> Mark:
    assert option.floor is not None
    return Mark(
        title=option.title,
        label=_shortened(option.title, letters),
        tone=option.verdict.name.lower(),
        floor=across(option.floor),
        ceiling=across(max(option.most, option.floor)),
        height=at,
        label_height=label_at,
        words=_words(option),
    )


def _shortened(title: str, letters: int) -> str:
    """At most so many letters, without the middle: the ends of names differ as often as their beginnings."""
    if len(title) <= letters:
        return title
    end = (letters - 1) // 2
    return f"{title[: letters - 1 - end]}…{title[-end:]}"


def _words(option: Option) -> str:
    accuracy = "accuracy not measured" if option.accuracy is None else f"accuracy {option.accuracy:.1%}"
    most = max(option.most, option.floor or 0.0)
    return f"{option.title}: {option.floor:.0%} recovered, up to {most:.0%} not ruled out; {accuracy}"


def _ticks(low: float, high: float) -> list[float]:
    step = next((step for step in STEPS if (high - low) / step <= MOST_TICKS), STEPS[-1])
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]


def _apart(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Heights of labels close to these, none nearer to the next than GAP."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    moved = list(heights)
    edge = top
    for place in order:  # downwards, then back up from the lower end
        moved[place] = max(moved[place], edge)
        edge = moved[place] + GAP
    edge = bottom
    for place in reversed(order):
        moved[place] = min(moved[place], edge)
        edge = moved[place] - GAP
    return moved
