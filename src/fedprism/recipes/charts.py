"""A figure's curves as a vector picture that any browser shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 20, 55
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def line_chart(curves: Mapping[str, Points], *, x: str, y: str, log_x: bool = False, log_y: bool = False) -> str:
    """One line a curve, named beside the plot. Logarithmic axes leave out what is not positive."""
    shown = {
        name: [(a, b) for a, b in points if (a > 0 or not log_x) and (b > 0 or not log_y)]
        for name, points in curves.items()
    }
    across = _Axis([a for points in shown.values() for a, _ in points], LEFT, WIDTH - RIGHT, log=log_x)
    upward = _Axis([b for points in shown.values() for _, b in points], HEIGHT - BOTTOM, TOP, log=log_y)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f"<title>{escape(y)} against {escape(x)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for value in across.ticks():
        place = across.place(value)
        parts.append(f'<line x1="{place:.1f}" y1="{TOP}" x2="{place:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in upward.ticks():
        place = upward.place(value)
        parts.append(f'<line x1="{LEFT}" y1="{place:.1f}" x2="{WIDTH - RIGHT}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{value:g}</text>')
    for number, (name, points) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(across.place(a), upward.place(b)) for a, b in sorted(points)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]
        height = TOP + 16 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{height - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{height + 1}">{escape(name)}</text>')
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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
