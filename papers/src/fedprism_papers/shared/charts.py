"""Figures as vector pictures that any browser shows: curves, points, bars of rates, maps and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
INK, PAPER, RULE = "#222", "#fff", "#ccc"
LEFT, TOP, BOTTOM = 60, 40, 40
"""Pixels beside, above and below a plot."""
PLOT_WIDTH, PLOT_HEIGHT, LEGEND_WIDTH = 400, 320, 230  # pixels
MAP_TOP, CELL = TOP + 16, 44  # pixels


class Rate(NamedTuple):
    value: float
    low: float
    high: float


class Drawing(NamedTuple):
    width: float
    height: float
    parts: tuple[str, ...]


def page(drawings: Sequence[Drawing]) -> str:
    """Drawings below each other as one picture."""
    width, height = max((d.width for d in drawings), default=1), sum(d.height for d in drawings)
    font = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {font}>',
        f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
    ]
    top = 0.0
    for drawing in drawings:
        lines += [f'<g transform="translate(0 {top:g})">', *drawing.parts, "</g>"]
        top += drawing.height
    return "\n".join([*lines, "</svg>"]) + "\n"


def line_chart(curves: Mapping[str, Points], *, x: str, y: str, log_x: bool = False, log_y: bool = False) -> str:
    """One line a curve, named beside the plot."""
    return page([points(f"{y} against {x}", curves, x=x, y=y, log_x=log_x, log_y=log_y, joined=True)])


def points(
    title: str,
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    joined: bool = False,
) -> Drawing:
    """Points in the plane, one colour a series; logarithmic axes leave out what is not positive."""
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    shown = [[(a, b) for a, b in each if (a > 0 or not log_x) and (b > 0 or not log_y)] for each in series.values()]
    across = _Axis([a for curve in shown for a, _ in curve], LEFT, right, log=log_x)
    upward = _Axis([b for curve in shown for _, b in curve], bottom, TOP, log=log_y)
    parts = [_text(LEFT, 18, title, bold=True)]
    for value in across.ticks():
        place = across.place(value)
        parts += [_line(place, TOP, place, bottom, RULE), _text(place, bottom + 16, f"{value:g}", anchor="middle")]
    for value in upward.ticks():
        place = upward.place(value)
        parts += [_line(LEFT, place, right, place, RULE), _text(LEFT - 6, place + 4, f"{value:g}", anchor="end")]
    for number, curve in enumerate(shown):
        places = [(across.place(a), upward.place(b)) for a, b in (sorted(curve) if joined else curve)]
        if joined:
            parts.append(_polyline(places, _colour(number), 2))
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{_colour(number)}"/>' for a, b in places]
    parts += _legend(right, list(series))
    parts.append(_text(LEFT + PLOT_WIDTH / 2, bottom + 34, f"{x}; upwards: {y}", anchor="middle"))
    return Drawing(right + LEGEND_WIDTH, max(bottom + 50, TOP + 18 * len(series)), tuple(parts))


def bars(title: str, groups: Mapping[str, Mapping[str, Rate]]) -> Drawing:
    """For each group a bar a series, from 0 to 1, with the interval on top."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    bar, gap, tall = 13, 22, 130
    wide = len(groups) * (bar * len(series) + gap)
    parts = [_text(LEFT, 18, title, bold=True)]
    for rate in (0.0, 0.5, 1.0):
        height = TOP + tall * (1 - rate)
        parts.append(_line(LEFT, height, LEFT + wide, height, RULE))
        parts.append(_text(LEFT - 6, height + 4, f"{rate:.0%}", anchor="end"))
    for number, (group, rates) in enumerate(groups.items()):
        left = LEFT + gap / 2 + number * (bar * len(series) + gap)
        parts.append(_text(left + bar * len(series) / 2, TOP + tall + 18, group, anchor="middle"))
        for place, name in enumerate(series):
            if name not in rates:
                continue
            value, low, high = rates[name]
            x, middle = left + bar * place, left + bar * (place + 0.5)
            parts.append(_box(x, TOP + tall * (1 - value), bar - 2, max(1.0, tall * value), _colour(place)))
            parts.append(_line(middle - 1, TOP + tall * (1 - high), middle - 1, TOP + tall * (1 - low), INK))
    parts += _legend(LEFT + wide, series)
    return Drawing(LEFT + wide + LEGEND_WIDTH, TOP + max(tall + BOTTOM, 18 * len(series)), tuple(parts))


def maps(title: str, panels: Mapping[str, Mapping[tuple[int, int], float]], *, x: str, y: str) -> Drawing:
    """Panels side by side, each a table (x, y) -> rate in shades; a red line runs around what has a rate of nothing."""
    gap = 60
    parts, left, tallest = [_text(LEFT, 18, title, bold=True)], float(LEFT), 0
    for name, rates in panels.items():
        columns, lines = (sorted({key[axis] for key in rates}) for axis in (0, 1))
        tallest = max(tallest, len(lines))
        parts.append(_text(left, TOP + 6, name))
        placed = {(columns.index(a), len(lines) - 1 - lines.index(b)): rate for (a, b), rate in rates.items()}
        for (column, row), rate in placed.items():
            place, top = left + CELL * column, MAP_TOP + CELL * row
            parts.append(_box(place, top, CELL, CELL, _shade(rate)))
            ink = PAPER if rate > 0.6 else INK
            parts.append(_text(place + CELL / 2, top + CELL / 2 + 4, f"{rate:.0%}", anchor="middle", ink=ink))
        parts += [edge for spot, rate in placed.items() if rate == 0 for edge in _border(spot, placed, left)]
        for row, line in enumerate(reversed(lines)):
            parts.append(_text(left - 6, MAP_TOP + CELL * (row + 0.5) + 4, str(line), anchor="end"))
        under = MAP_TOP + CELL * len(lines) + 16
        for number, value in enumerate(columns):
            parts.append(_text(left + CELL * (number + 0.5), under, str(value), anchor="middle"))
        parts.append(_text(left + CELL * len(columns) / 2, under + 16, f"{x}; upwards: {y}", anchor="middle"))
        left += max(CELL * len(columns), 150) + gap
    return Drawing(left, MAP_TOP + CELL * tallest + 50, tuple(parts))


def _border(spot: tuple[int, int], placed: Mapping[tuple[int, int], float], left: float) -> list[str]:
    """The sides of a cell beyond which something is recovered."""
    column, row = spot
    west, north = left + CELL * column, MAP_TOP + CELL * row
    east, south = west + CELL, north + CELL
    sides = {
        (column - 1, row): (west, north, west, south),
        (column + 1, row): (east, north, east, south),
        (column, row - 1): (west, north, east, north),
        (column, row + 1): (west, south, east, south),
    }
    return [_line(*side, "#c00", 3) for beyond, side in sides.items() if placed.get(beyond, 0.0) > 0]


def histograms(
    title: str, panels: Mapping[str, Mapping[str, Sequence[float]]], *, ends: tuple[float, float], x: str, columns: int
) -> Drawing:
    """Panels in rows, each as high as its largest value: fractions in equally wide classes between `ends`."""
    wide, tall, gap, aside = 190, 80, 52, 30
    series = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    parts = [_text(LEFT, 18, title, bold=True)]
    for number, (name, panel) in enumerate(panels.items()):
        left, top = LEFT + (number % columns) * (wide + aside), TOP + 14 + (number // columns) * (tall + gap)
        highest = max((part for heights in panel.values() for part in heights), default=0.0) or 1.0
        parts += [_text(left, top - 5, name), _line(left, top + tall, left + wide, top + tall, RULE)]
        for fraction in (0.0, 0.5, 1.0):
            value = ends[0] + fraction * (ends[1] - ends[0])
            parts.append(_text(left + wide * fraction, top + tall + 14, f"{value:g}", anchor="middle"))
        for line, heights in panel.items():
            places = [
                (left + wide * (place + 0.5) / len(heights), top + tall * (1 - height / highest))
                for place, height in enumerate(heights)
            ]
            parts.append(_polyline(places, _colour(series.index(line)), 1.5))
    right = LEFT + columns * (wide + aside)
    parts += _legend(right, series)
    high = TOP + 14 + -(-len(panels) // columns) * (tall + gap)
    parts.append(_text(LEFT, high - 6, x))
    return Drawing(right + 260, max(high + 10, TOP + 18 * len(series)), tuple(parts))


class _Axis:
    """From values to places between two ends of the picture."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        self._log, self._start, self._end = log, start, end
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if not log and low >= 0 and low < high / 2:
            low = 0.0
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def place(self, value: float) -> float:
        inner = math.log10(value) if self._log else value
        return self._start + (inner - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            steps = (1,) if self._high - self._low > 2 else (1, 2, 5)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [v for v in values if self._low - 1e-9 <= math.log10(v) <= self._high + 1e-9]
        step = 10.0 ** math.floor(math.log10((self._high - self._low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self._high - self._low) / (step * factor) <= 6)
        first = math.ceil(self._low / step - 1e-9)
        return [round(k * step, 12) for k in range(first, math.floor(self._high / step + 1e-9) + 1)]


def _legend(left: float, names: Sequence[str]) -> list[str]:
    """The names of the series with their colours, to the right of a plot."""
    boxes = [_box(left + 14, TOP + 18 * place, 11, 11, _colour(place)) for place in range(len(names))]
    return boxes + [_text(left + 31, TOP + 10 + 18 * place, name) for place, name in enumerate(names)]


def _polyline(places: Points, colour: str, width: float) -> str:
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _shade(rate: float) -> str:
    """From white to the first colour of the charts."""
    first = [int(COLOURS[0][place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + rate * (level - 255)):02x}" for level in first)


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, ink: str = INK) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, ink: str, width: int = 1) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{ink}" stroke-width="{width}"/>'
