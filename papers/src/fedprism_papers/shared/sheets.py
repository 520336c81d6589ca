"""Pictures beside a table, as pixels (3, height, width): originals above what came back, and bar charts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedprism_papers.shared.base import Entry, Measured

GAP = 2  # pixels between pictures
LEAST_SIDE = 64
"""Smaller images are enlarged, pixel by pixel, to about this."""
BAR, HEIGHT = 24, 120  # pixels: the width of a bar, the height of a chart
INK = (0.16, 0.33, 0.55)  # red, green, blue


def contact_sheet(entries: Mapping[str, Entry]) -> tuple[Tensor | None, str]:
    """A row of originals and below it one for each method that shows the same ones; the caption says which."""
    rows: list[Tensor] = []
    names: list[str] = []
    shown: Tensor | None = None
    for name, entry in entries.items():
        if not isinstance(entry, Measured) or entry.pictures is None:
            continue
        originals, recovered = entry.pictures
        if shown is None or not torch.equal(shown, originals):
            rows.append(_line(originals))
            names.append("originals")
            shown = originals
        rows.append(_line(recovered))
        names.append(name)
    if not rows:
        return None, ""
    width = max(row.shape[2] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[2], 0, GAP), value=1.0) for row in rows]
    return torch.cat(padded, dim=1)[:, :-GAP], f"From top to bottom: {', '.join(names)}. Black: no answer."


def bar_chart(counts: Tensor) -> Tensor:
    """Bars as high as their part of the highest one, from left to right."""
    chart = torch.ones(3, HEIGHT, BAR * len(counts))
    highest = max(float(counts.max()), 1.0)
    for number, count in enumerate(counts.tolist()):
        top = HEIGHT - round((HEIGHT - 1) * count / highest)
        chart[:, top:, number * BAR + 1 : (number + 1) * BAR - 1] = torch.tensor(INK).view(3, 1, 1)
    chart[:, -1] = 0.0
    return chart


def sparkline(counts: Tensor) -> str:
    """The same bars in one line of text."""
    marks = " ▁▂▃▄▅▆▇█"
    highest = max(float(counts.max()), 1.0)
    return "".join(marks[-(-int(count * 8) // int(highest))] for count in counts.tolist())


def _line(images: Tensor) -> Tensor:
    """Images (count, channels, height, width) side by side in colour."""
    factor = max(1, round(LEAST_SIDE / images.shape[2]))
    shown = images.float().expand(-1, 3, -1, -1).repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    return torch.cat([torch.nn.functional.pad(image, (0, GAP), value=1.0) for image in shown], dim=2)[:, :, :-GAP]
