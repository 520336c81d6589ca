"""Units that copy: a kernel with one entry passes an image on, a row with one entry passes a unit on.

MKOR carries the image to the first dense layer and its units to the outputs so: exact zeros around the entries in the
naive form, small noise in the inconspicuous one, where units come in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.inspection.base import Finding, Layer, chunks, serious

FEWEST_ENTRIES = 24
"""Shorter lines have large entries by chance: those of depthwise and 1x1 convolutions are often near to a delta."""
FEW = 8
"""A line that copies has at most this many entries."""
ROW_GAP = 4.0
"""How many times the next one the smallest of a row's few entries must be."""
COLUMN_GAP = 20.0
"""The same for a column: units that serve one class alone have gaps of their own."""
FEWEST = 4
"""Lines that it takes; trained layers have one or two."""
LEAST_SHARE = 0.005
"""Fraction of a layer's lines that it takes: the same for wide layers."""
NEGLIGIBLE = 1e-3
"""Lines whose largest entry is below this fraction of the layer's largest are dead, by decay, and copy nothing."""
BACKGROUND = 20
"""Entries that a line must have before a gap between them means something; pruning leaves fewer."""
MANY_SMALL = 0.2
"""Fraction of the other lines' entries that are as small as the noise where all were shrunk; under L1 mostly 0.3."""
SAMPLE = 256
"""Lines of either kind that are looked at for that."""
TIMES_SMOOTH = 3
"""How many times as many that is as of entries spread evenly up to their root mean square."""
NEARLY_ALL = 0.9
"""Fraction of the lines with entries that have exactly one in pieces of an identity."""
ONE_SIZE = 1.01
"""How many times the smallest of these entries the largest may be."""
PRUNED = 0.1
"""With more zeros than this in all other lines, a layer is pruned, and zeros are no evidence."""


def single_entries(layer: Layer) -> Iterator[Finding]:
    """Rows or columns that consist of a few entries, nearly or exactly."""
    columns = [] if layer.convolution else [("columns", layer.rows.T, COLUMN_GAP)]
    for kind, lines, gap in [("kernels" if layer.convolution else "rows", layer.rows, ROW_GAP), *columns]:
        if len(lines) >= FEWEST and lines.shape[1] >= FEWEST_ENTRIES:
            yield from _judged(layer, kind, lines, gap)


class _Lines(NamedTuple):
    """What counts of each line: its largest entries and where the largest is, its sign, and how many are not zero."""

    largest: Tensor
    place: Tensor
    sign: Tensor
    entries: Tensor

    @classmethod
    def of(cls, lines: Tensor) -> _Lines:
        columns = []
        for chunk in chunks(lines):
            top = chunk.abs().topk(FEW + 1, dim=1)
            signs = chunk.gather(1, top.indices[:, :1]).flatten().sign()
            columns.append((top.values, top.indices[:, 0], signs, chunk.count_nonzero(1)))
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def live(self) -> Tensor:
        return self.largest[:, 0] > NEGLIGIBLE * self.largest.max()

    def gaps(self) -> Tensor:
        """The widest gap behind each line's few entries, in front of noise: how many times larger the last one is."""
        above, below = self.largest[:, :-1], self.largest[:, 1:]
        return torch.where(below > 0, above / below.clamp(min=1e-38), 0).amax(1)


def _judged(layer: Layer, kind: str, lines: Tensor, gap: float) -> Iterator[Finding]:
    ends = _Lines.of(lines)
    live, gaps, noisy = ends.live(), ends.gaps(), _noisy(ends, gap)
    others = lines[~noisy]
    if kind == "columns" and not bool((live & ~noisy).any()) and layer.rows.shape[1] >= FEWEST_ENTRIES:
        others = layer.rows[~_noisy(_Lines.of(layer.rows), ROW_GAP)]  # no column tells, but rows may
    if _shrunk(lines[noisy], others):
        noisy = torch.zeros_like(noisy)
    exact = live & (ends.entries <= FEW)
    if _is_pruned(ends.entries[~exact], lines.shape[1]) and not _selects(exact, ends):
        exact = torch.zeros_like(exact)
    count, exactly, nearly = (int(chosen.sum()) for chosen in (noisy | exact, exact, noisy))
    if count >= max(FEWEST, LEAST_SHARE * len(lines)):
        smallest = float(gaps[noisy].min()) if nearly else 0.0
        yield serious(
            "single-entries",
            layer.name,
            f"{count} of {len(lines)} {kind} consist of at most {FEW} entries "
            f"({exactly} exactly, {nearly} but for noise): they copy what comes in",
            {"lines": len(lines), "exact": exactly, "under_noise": nearly, "smallest_gap": smallest},
        )


def _noisy(lines: _Lines, gap: float) -> Tensor:
    """Which lines consist of a few entries but for noise."""
    return _in_different_places(lines.live() & (lines.entries >= BACKGROUND) & (lines.gaps() >= gap), lines.place)


def _in_different_places(noisy: Tensor, places: Tensor) -> Tensor:
    """None of them where most share a place: one unit grew too large there, as when training diverges."""
    distinct = len(set(places[noisy].tolist()))
    return noisy if 2 * distinct >= int(noisy.sum()) else torch.zeros_like(noisy)


def _shrunk(noisy: Tensor, others: Tensor) -> bool:
    """Whether entries were drawn to zero all over the layer, as an L1 penalty does: then gaps are no evidence."""
    noisy, others = noisy[:SAMPLE].abs(), others[:SAMPLE].abs()
    if not len(noisy) or not bool(others.any()):
        return False
    level, others = noisy.median(1).values.median(), others[others.amax(1) > 0]
    small = (others <= level).float().mean()
    return bool((small > MANY_SMALL) & (small > TIMES_SMOOTH * level / others.square().mean().sqrt()))


def _is_pruned(entries: Tensor, length: int) -> bool:
    """Whether zeros are common in lines that do not copy, or there are no such lines to tell by."""
    return not len(entries) or int(entries.sum()) < (1 - PRUNED) * len(entries) * length


def _selects(exact: Tensor, lines: _Lines) -> bool:
    """Whether all lines have one entry, all of one size and no two the same: they are pieces of an identity."""
    chosen = exact & (lines.entries == 1)
    count = int(chosen.sum())
    if count < FEWEST or count < NEARLY_ALL * int((lines.entries > 0).sum()):
        return False
    values = lines.largest[chosen, 0]
    distinct = set(zip(lines.place[chosen].tolist(), lines.sign[chosen].tolist(), strict=True))
    return bool(values.max() <= ONE_SIZE * values.min()) and len(distinct) == count
