"""Rows that are copies of each other.

Two units with the same or the opposite direction see the same thing of every input. Training from random weights does
not make them; tampering does. An imprint layer has one direction in all rows, told apart by their biases, and naive
MKOR as well; inconspicuous MKOR has pairs of opposite rows, of which one passes each sample.

Noise as large as the weights hides what the rows of an imprint layer share from a glance at any two of them, but not
from one at all, and not its biases: thresholds that sort whole images lie many lengths of a row apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.inspection.base import Finding, Layer, Severity, dense_widths, layers, parts, spread_entries, unit_rows
from fedprism.types import Update

FEWEST_ROWS = 8
"""Below this, symmetric training makes copies by itself: the two rows of a two-class head are opposite."""
FEWEST_PAIRS = 4
FEWEST_ENTRIES = 24
"""Rows spread over fewer entries meet by chance, above all where they are pruned or of one bit."""
MOST_ROWS = 16384
WIDTH = 1024
"""Longer rows are folded to this many entries, which moves a cosine by about 0.03 and leaves that of copies at 1."""
COPIES = 0.9999
"""Where training diverges, rows come as close as 0.999."""
OPPOSITE = 0.6
OPPOSITE_KERNELS = 0.95
"""Trained kernels of the first layers come in nearly opposite pairs by themselves, at cosines down to -0.85."""
GAP = 0.25
"""A pair is closer to each other than to any other row by this much of a cosine."""
ONE_DIRECTION = 0.85
"""Weights drawn between 0 and a number have a share of 0.75."""
ONE_DIRECTION_OF_FEW = 0.99
"""For layers of fewer than MANY_ROWS: narrow networks of sigmoids that do not learn drift in one direction."""
MANY_ROWS = 32
SORTING = 1.0
"""Standard deviation of the biases, in lengths of a row; about 0.02 in trained layers, 0.1 where training diverged."""
STANDS_OUT = 2.5
"""How many times the second direction's strength the first one's is in such a layer; below 2 in trained ones."""


class _Partners(NamedTuple):
    best: Tensor
    """(rows,) cosine with the row that is most parallel or opposite."""
    partner: Tensor
    second: Tensor
    """(rows,) absolute cosine with the next one."""


def aligned_rows(params: Update) -> list[Finding]:
    """Layers in which rows are copies of each other, come in opposite pairs, or all have one direction."""
    widths = dense_widths(params)
    found = []
    for layer in layers(params):
        if len(layer.rows) < FEWEST_ROWS:
            continue
        directions = _directions(layer.rows[:MOST_ROWS])
        if len(directions) >= FEWEST_ROWS:
            found += _judged(layer, directions, last=layer.is_last(widths))
    return found


def _directions(rows: Tensor) -> Tensor:
    """The rows at length 1, folded to at most WIDTH entries; those spread over too few entries are left out."""
    enough = max(FEWEST_ENTRIES, 2 * math.log2(len(rows)) + 8)
    fold = _Fold(rows)
    kept = []
    for part in parts(rows):
        units, lengths = unit_rows(part)
        kept.append(fold(units[(lengths > 0) & (spread_entries(units) >= enough)]))
    return torch.cat(kept)


class _Fold:
    """Shortens rows to WIDTH entries with nearly the same cosines: entries are added up with random signs."""

    def __init__(self, rows: Tensor) -> None:
        self.needed = rows.shape[1] > WIDTH
        if self.needed:
            rng = torch.Generator().manual_seed(0)
            self.signs = (2.0 * torch.randint(2, rows.shape[1:], generator=rng) - 1).to(rows)
            self.places = torch.randint(WIDTH, rows.shape[1:], generator=rng).to(rows.device)

    def __call__(self, units: Tensor) -> Tensor:
        if not self.needed:
            return units
        short = units.new_zeros(len(units), WIDTH).index_add_(1, self.places, units * self.signs)
        return unit_rows(short)[0]


def _judged(layer: Layer, units: Tensor, *, last: bool) -> list[Finding]:
    """In a last layer copies are no evidence: classes of which there are no samples are all pushed the same way."""
    partners = _partners(units)
    copies = int(((partners.best.abs() >= COPIES) & ~_of_signs(units)).sum())
    pairs = _opposite_pairs(partners, OPPOSITE_KERNELS if layer.convolution else OPPOSITE)
    direction = _direction(units)
    share = float((units @ direction).square().mean())
    most = ONE_DIRECTION if len(units) >= MANY_ROWS else ONE_DIRECTION_OF_FEW
    evidence = {"rows": len(layer.rows), "copies": copies, "opposite_pairs": pairs, "share_of_one_direction": share}
    if not layer.convolution and share >= most and not last:
        sentence = f"{share:.0%} of {len(units)} rows' energy lies in one direction, as in an imprint layer"
    elif pairs >= FEWEST_PAIRS:
        sentence = f"{pairs} pairs of rows are opposite to each other and to no other row"
    elif copies >= 2 * FEWEST_PAIRS and not last:
        sentence = f"{copies} of {len(units)} rows are copies of another row, up to sign and length"
    elif (thresholds := _thresholds(layer, units, direction)) >= SORTING:
        sentence = (
            f"biases lie {thresholds:.2g} lengths of a row apart, and one direction stands out among the rows: "
            "units that sort whole inputs, as in an imprint layer under noise"
        )
        evidence["spread_of_biases"] = thresholds
    else:
        return []
    if layer.bias is not None:
        evidence["distinct_biases"] = len(set(layer.bias.tolist()))
    return [
        Finding(
            check="aligned-rows", severity=Severity.SERIOUS, tensor=layer.name, sentence=sentence, evidence=evidence
        )
    ]


def _of_signs(units: Tensor) -> Tensor:
    """(rows,) whether a row's entries are all of one size: one step of Adam from zero makes such, and some agree."""
    return spread_entries(units) > 0.999 * units.shape[1]


def _partners(units: Tensor) -> _Partners:
    best, partner, second = [], [], []
    for start in range(0, len(units), 1024):
        cosines = units[start : start + 1024] @ units.T
        numbers = torch.arange(len(cosines), device=units.device)
        cosines[numbers, start + numbers] = 0
        top = cosines.abs().topk(2, dim=1)
        best.append(cosines.gather(1, top.indices[:, :1]).flatten())
        partner.append(top.indices[:, 0])
        second.append(top.values[:, 1])
    return _Partners(torch.cat(best), torch.cat(partner), torch.cat(second))


def _opposite_pairs(partners: _Partners, cosine: float) -> int:
    """How many pairs are each other's partners, opposite, and far closer than to any third row."""
    mutual = partners.partner[partners.partner] == torch.arange(len(partners.partner), device=partners.partner.device)
    clear = (partners.best <= -cosine) & (partners.best.abs() - partners.second >= GAP)
    return int((mutual & clear).sum()) // 2


def _direction(units: Tensor, steps: int = 20) -> Tensor:
    """The direction that holds the largest share of the rows' energy, by power iteration."""
    direction = units[0]
    for _ in range(steps):
        direction = units.T @ (units @ direction)
        direction = direction / torch.linalg.vector_norm(direction)
    return direction


def _thresholds(layer: Layer, units: Tensor, direction: Tensor) -> float:
    """How far biases lie apart, in lengths of a row, if one direction stands out among the rows; otherwise 0."""
    if layer.convolution or layer.bias is None or len(units) < MANY_ROWS:
        return 0.0
    lengths = torch.cat([unit_rows(part)[1] for part in parts(layer.rows)])
    apart = float(layer.bias.double().std() / lengths.median().clamp(min=1e-30))
    if apart < SORTING:
        return 0.0
    along = units @ direction
    rest = units - along.unsqueeze(1) * direction
    second = rest @ _direction(unit_rows(rest)[0])
    stands_out = along.square().mean() >= STANDS_OUT**2 * second.square().mean()
    return apart if bool(stands_out) else 0.0
