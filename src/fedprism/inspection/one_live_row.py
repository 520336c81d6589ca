"""A last layer through which one class answers alone.

Class fishing zeroes (or damps) the rows of all classes but one and sets their biases above anything that the live row
can reach. Rows that pruning or weight decay emptied have no such biases, and a class that is merely rare has a low bias
and a short row, not a long one.

Among a hundred classes or more each is improbable by itself, and no bias is needed. Then lengths have to tell, of which
there are many: one row is far from all others, which are near to each other. A class that is in nearly all samples has
such a row as well, but then its bias is the highest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.inspection.base import Finding, Layer, Severity, dense_widths, layers, parts, unit_rows
from fedprism.types import Update

DAMPED = 0.2
"""Rows shorter than this, relative to the longest, count as silent."""
MOST_LIVE = 0.25
BIAS_GAP = 3.0
"""In nats, if it is the last layer: at this gap a class keeps 5 % of its probability."""
LONGER = 1.7
SMALL_GAP = 0.7
"""One row this much longer than any other whose bias is below the others': each is rare, both together are made."""
ALONE = 8.0
"""Where one row of a last layer is this much longer than any other, its bias need only not be the highest."""
EMPTY = 1e3
"""Where it is this much longer, its bias may be anything, if the row has not been pruned itself."""
LEAST_KEPT = 0.1
FEWEST_ROWS, FEWEST_ENTRIES = 2, 8
"""Below these, lengths differ by chance."""
SOME_ROWS = 4
"""Fewer rows than this have to be silent, not only shorter."""
MANY_ROWS = 100
FAR = 4.0
"""The longest row is beyond the next one by this many times what that one is beyond the median."""


def one_live_row(params: Update) -> list[Finding]:
    """Dense layers in which most rows are silent, with biases above the live ones', or one row drowns all others."""
    widths = dense_widths(params)
    found = []
    for layer in layers(params):
        enough = len(layer.rows) >= FEWEST_ROWS and layer.rows.shape[1] >= FEWEST_ENTRIES
        if not layer.convolution and layer.bias is not None and enough:
            found += _fishing(layer, layer.bias, last=layer.is_last(widths))
    return found


def _fishing(layer: Layer, bias: Tensor, *, last: bool) -> list[Finding]:
    lengths = torch.cat([unit_rows(part)[1] for part in parts(layer.rows)])
    longest, second = lengths.topk(2).values.tolist()
    if not longest:
        return []
    live, times = lengths > DAMPED * longest, longest / max(second, 1e-30)
    few = int(live.sum()) <= max(1, MOST_LIVE * len(lengths)) and _gap(bias, live) >= BIAS_GAP
    first = lengths == longest
    everywhere = bool(bias.argmax() == lengths.argmax())
    kept = int(layer.rows[lengths.argmax()].count_nonzero()) >= LEAST_KEPT * layer.rows.shape[1]
    alone = last and kept and times >= (EMPTY if everywhere else ALONE)
    longer = len(lengths) >= SOME_ROWS and times >= LONGER
    apart = last and not everywhere and _apart(lengths)
    if not few and not alone and not (longer and (_gap(bias, first) >= SMALL_GAP or apart)):
        return []
    answering = live if few else first
    gap, silent, target = _gap(bias, answering), int((~answering).sum()), int(lengths.argmax())
    return [
        Finding(
            check="one-live-row",
            severity=Severity.SERIOUS,
            tensor=layer.name,
            sentence=(
                f"{silent} of {len(lengths)} rows are silent or damped ({times:.3g} times shorter than the longest), "
                f"with biases {gap:.3g} above its: samples of class {target} would answer almost alone"
            ),
            evidence={
                "silent_rows": silent,
                "rows": len(lengths),
                "times_longer": times,
                "bias_gap": gap,
                "class": target,
            },
        )
    ]


def _apart(lengths: Tensor) -> bool:
    """Whether, of many rows, one is far longer than all others."""
    (longest, second), middle = lengths.topk(2).values, lengths.median()
    return len(lengths) >= MANY_ROWS and bool(longest - second >= FAR * (second - middle))


def _gap(bias: Tensor, live: Tensor) -> float:
    """How far the biases of the other rows, but for their lowest tenth, lie above those of the live ones."""
    others = bias[~live].sort().values
    return float(others[len(others) // 10] - bias[live].max()) if len(others) else 0.0
