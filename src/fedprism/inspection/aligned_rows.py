"""Rows that are copies of each other.

Training does not make two units of the same or the opposite direction; tampering does. An imprint layer and naive MKOR
have one direction in all rows, inconspicuous MKOR has pairs of opposite rows. Noise as large as the weights hides an
imprint layer's direction from a look at two rows, but not from one at all, and not its biases, many lengths apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.inspection.base import Finding, Layer, chunks, serious, spread_entries, unit_rows

FEWEST_ROWS = 8
"""Below this, symmetric training makes copies by itself: the two rows of a two-class head are opposite."""
FEWEST_PAIRS = 4
"""Pairs of copies or of opposite rows that it takes; fewer happen in honest models."""
FEWEST_ENTRIES = 24
"""Rows spread over fewer entries meet by chance, above all where they are pruned or of one bit."""
MOST_ROWS = 16384
"""Rows of a layer that are compared: bounds the time, which is quadratic in them."""
CHUNK_ROWS = 1024
"""Rows that are compared with all others at a time: bounds memory."""
WIDTH = 1024
"""Longer rows are folded to this many entries, which moves a cosine by about 0.03 and leaves that of copies at 1."""
COPIES = 0.9999
"""Cosine of copies. Where training diverges, rows come as close as 0.999."""
OPPOSITE = 0.6
"""Minus the cosine from which rows of dense layers are opposite, also under noise."""
OPPOSITE_KERNELS = 0.95
"""The same of kernels: trained ones of first layers come in nearly opposite pairs, at cosines down to -0.85."""
GAP = 0.25
"""A pair is closer to each other than to any other row by this much of a cosine."""
ONE_DIRECTION = 0.85
"""Fraction of the rows' energy in one direction; weights drawn between 0 and a number have 0.75."""
ONE_DIRECTION_OF_FEW = 0.99
"""The same for fewer than MANY_ROWS: narrow networks of sigmoids that do not learn drift in one direction."""
MANY_ROWS = 32
"""From this many rows on, honest ones do not drift in one direction together: a bound."""
SORTING = 1.0
"""Standard deviation of the biases, in lengths of a row; about 0.02 in trained layers, 0.1 where training diverged."""
STANDS_OUT = 2.5
"""How many times the second direction's strength the first one's is in such a layer; below 2 in trained ones."""
EQUAL_SIZES = 0.999
"""Participation of a row's entries, relative to all, from which they count as all of one size."""
POWER_STEPS = 20
"""Steps of the power iteration: a bound, as a direction that stands out is found in a few."""


class _Partners(NamedTuple):
    best: Tensor
    """(rows,) cosine with the row that is most parallel or opposite."""
    partner: Tensor
    second: Tensor
    """(rows,) absolute cosine with the next one."""


def aligned_rows(layer: Layer) -> Iterator[Finding]:
    """Rows that are copies, come in opposite pairs, or all have one direction; copies are usual in a last layer."""
    if len(layer.rows) < FEWEST_ROWS:
        return
    units = _directions(layer.rows[:MOST_ROWS])
    if len(units) < FEWEST_ROWS:
        return
    partners, direction = _partners(units), _direction(units)
    copies = int(((partners.best.abs() >= COPIES) & ~_of_signs(units)).sum())
    pairs = _opposite_pairs(partners, OPPOSITE_KERNELS if layer.convolution else OPPOSITE)
    energy = float((units @ direction).square().mean())
    most = ONE_DIRECTION if len(units) >= MANY_ROWS else ONE_DIRECTION_OF_FEW
    evidence = {"rows": len(layer.rows), "copies": copies, "opposite_pairs": pairs, "share_of_one_direction": energy}
    if not layer.convolution and energy >= most and not layer.last:
        sentence = f"{energy:.0%} of {len(units)} rows' energy is in one direction, as in an imprint layer"
    elif pairs >= FEWEST_PAIRS:
        sentence = f"{pairs} pairs of rows are opposite to each other and to no other row"
    elif copies >= 2 * FEWEST_PAIRS and not layer.last:
        sentence = f"{copies} of {len(units)} rows are copies of another row, up to sign and length"
    elif (thresholds := _thresholds(layer, units, direction)) >= SORTING:
        sentence = (
            f"biases differ by {thresholds:.2g} lengths of a row, and one direction stands out among the rows: "
            "units that sort whole inputs, as in an imprint layer under noise"
        )
        evidence["spread_of_biases"] = thresholds
    else:
        return
    if layer.bias is not None:
        evidence["distinct_biases"] = len(set(layer.bias.tolist()))
    yield serious("aligned-rows", layer.name, sentence, evidence)


def _directions(rows: Tensor) -> Tensor:
    """The rows at length 1, folded to at most WIDTH entries; those spread over too few entries are left out."""
    enough = max(FEWEST_ENTRIES, 2 * math.log2(len(rows)) + 8)
    # Entries are added up with random signs, which leaves cosines nearly the same.
    rng = torch.Generator().manual_seed(0)
    signs = (2.0 * torch.randint(2, rows.shape[1:], generator=rng) - 1).to(rows)
    places = torch.randint(WIDTH, rows.shape[1:], generator=rng).to(rows.device)
    directions = []
    for chunk in chunks(rows):
        units, lengths = unit_rows(chunk)
        units = units[(lengths > 0) & (spread_entries(units) >= enough)]
        if rows.shape[1] > WIDTH:
            units = unit_rows(units.new_zeros(len(units), WIDTH).index_add_(1, places, units * signs))[0]
        directions.append(units)
    return torch.cat(directions)


def _of_signs(units: Tensor) -> Tensor:
    """(rows,) whether a row's entries are all of one size: one step of Adam from zero makes such, and some agree."""
    return spread_entries(units) > EQUAL_SIZES * units.shape[1]


def _partners(units: Tensor) -> _Partners:
    best, partner, second = [], [], []
    for start in range(0, len(units), CHUNK_ROWS):
        cosines = units[start : start + CHUNK_ROWS] @ units.T
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


def _direction(units: Tensor) -> Tensor:
    """The direction that holds the largest fraction of the rows' energy, by power iteration."""
    direction = units[0]
    for _ in range(POWER_STEPS):
        direction = units.T @ (units @ direction)
        direction = direction / torch.linalg.vector_norm(direction)
    return direction


def _thresholds(layer: Layer, units: Tensor, direction: Tensor) -> float:
    """How far biases lie apart, in lengths of a row, if one direction stands out among the rows; otherwise 0."""
    if layer.convolution or layer.bias is None or len(units) < MANY_ROWS:
        return 0.0
    apart = float(layer.bias.double().std() / layer.lengths().median().clamp(min=1e-30))
    if apart < SORTING:
        return 0.0
    along = units @ direction
    rest = units - along.unsqueeze(1) * direction
    second = rest @ _direction(unit_rows(rest)[0])
    stands_out = along.square().mean() >= STANDS_OUT**2 * second.square().mean()
    return apart if bool(stands_out) else 0.0
