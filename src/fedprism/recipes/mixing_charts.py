"""The pictures of the mixing-gradients study: bars of recovery rates, maps over channels and batch sizes, points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from fedprism.recipes.charts import COLOURS

FONT = 'font-family="sans-serif" font-size="12"'
INK, PAPER, RULE = "#222", "#fff", "#ccc"
LEFT, TOP, BOTTOM = 60, 40, 40
MAP_TOP, CELL = TOP + 16, 44


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
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {FONT}>',
        f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
    ]
    top = 0.0
    for drawing in drawings:
        lines += [f'<g transform="translate(0 {top:g})">', *drawing.parts, "</g>"]
        top += drawing.height
    return "\n".join([*lines, "</svg>"]) + "\n"


def bars(title: str, groups: Mapping[str, Mapping[str, Rate]]) -> Drawing:
    """For each group a bar a series, from 0 to 1, with the interval on top."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    bar, gap, tall = 13, 22, 130
    wide = len(groups) * (bar * len(series) + gap)
    parts = [_text(LEFT, 18, title, bold=True)]
    for share in (0.0, 0.5, 1.0):
        height = TOP + tall * (1 - share)
        parts.append(_line(LEFT, height, LEFT + wide, height, RULE))
        parts.append(_text(LEFT - 6, height + 4, f"{share:.0%}", anchor="end"))
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
    for place, name in enumerate(series):
        parts.append(_box(LEFT + wide + 14, TOP + 18 * place, 11, 11, _colour(place)))
        parts.append(_text(LEFT + wide + 31, TOP + 10 + 18 * place, name))
    return Drawing(LEFT + wide + 230, TOP + max(tall + BOTTOM, 18 * len(series)), tuple(parts))


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
    """Panels in rows of `columns`; in each a line a series through the shares of equally wide classes between `ends`.

    Series of all panels share their colours; each panel is as high as its largest share.
    """
    wide, tall, gap, aside = 190, 80, 52, 30
    series = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    parts = [_text(LEFT, 18, title, bold=True)]
    for number, (name, panel) in enumerate(panels.items()):
        left, top = LEFT + (number % columns) * (wide + aside), TOP + 14 + (number // columns) * (tall + gap)
        highest = max((share for shares in panel.values() for share in shares), default=0.0) or 1.0
        parts += [_text(left, top - 5, name), _line(left, top + tall, left + wide, top + tall, RULE)]
        for share in (0.0, 0.5, 1.0):
            value = ends[0] + share * (ends[1] - ends[0])
            parts.append(_text(left + wide * share, top + tall + 14, f"{value:g}", anchor="middle"))
        for line, shares in panel.items():
            places = [
                f"{left + wide * (place + 0.5) / len(shares):.1f},{top + tall * (1 - share / highest):.1f}"
                for place, share in enumerate(shares)
            ]
            colour = _colour(series.index(line))
            parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    right = LEFT + columns * (wide + aside)
    for place, name in enumerate(series):
        parts.append(_box(right + 14, TOP + 18 * place, 11, 11, _colour(place)))
        parts.append(_text(right + 31, TOP + 10 + 18 * place, name))
    high = TOP + 14 + -(-len(panels) // columns) * (tall + gap)
    parts.append(_text(LEFT, high - 6, x))
    return Drawing(right + 260, max(high + 10, TOP + 18 * len(series)), tuple(parts))


def points(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> Drawing:
    """Points in the plane, one colour a series."""
    wide, tall = 380, 220
    everything = [point for own in series.values() for point in own]
    across, upward = (_ends([point[axis] for point in everything]) for axis in (0, 1))
    parts = [_text(LEFT, 18, title, bold=True)]
    for step in range(5):
        share = step / 4
        at, height = LEFT + wide * share, TOP + tall * (1 - share)
        parts.append(_line(at, TOP, at, TOP + tall, RULE))
        parts.append(_line(LEFT, height, LEFT + wide, height, RULE))
        parts.append(_text(at, TOP + tall + 16, f"{across[0] + share * (across[1] - across[0]):.3g}", anchor="middle"))
        parts.append(_text(LEFT - 6, height + 4, f"{upward[0] + share * (upward[1] - upward[0]):.3g}", anchor="end"))
    for number, (name, own) in enumerate(series.items()):
        for a, b in own:
            at = LEFT + wide * (a - across[0]) / (across[1] - across[0])
            height = TOP + tall * (1 - (b - upward[0]) / (upward[1] - upward[0]))
            parts.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{_colour(number)}"/>')
        parts.append(_box(LEFT + wide + 14, TOP + 18 * number, 11, 11, _colour(number)))
        parts.append(_text(LEFT + wide + 31, TOP + 10 + 18 * number, name))
    parts.append(_text(LEFT + wide / 2, TOP + tall + 34, f"{x}; upwards: {y}", anchor="middle"))
    return Drawing(LEFT + wide + 230, TOP + max(tall + 50, 18 * len(series)), tuple(parts))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _shade(share: float) -> str:
    """From white to the first colour of the charts."""
    first = [int(COLOURS[0][place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + share * (level - 255)):02x}" for level in first)


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, ink: str = INK) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, ink: str, width: int = 1) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{ink}" stroke-width="{width}"/>'
