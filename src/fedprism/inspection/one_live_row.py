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

from fedprism.inspection.base import Finding, Layer, Severity, layers, parts, unit_rows
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
"""Where one row is this much longer than any other, biases need not be looked at: no layer is pruned to one unit."""
FEWEST_ROWS = 4
MANY_ROWS = 100
FAR = 4.0
"""The longest row is beyond the next one by this many times what that one is beyond the median."""


def one_live_row(params: Update) -> list[Finding]:
    """Dense layers in which most rows are silent, with biases above the live ones', or one row drowns all others."""
    consumed = {tensor.shape[1] for tensor in params.values() if tensor.dim() >= 2}
    found = []
    for layer in layers(params):
        if not layer.convolution and layer.bias is not None and len(layer.rows) >= FEWEST_ROWS:
            found += _fishing(layer, layer.bias, last=len(layer.rows) not in consumed)
    return found


def _fishing(layer: Layer, bias: Tensor, *, last: bool) -> list[Finding]:
    lengths = torch.cat([unit_rows(part)[1] for part in parts(layer.rows)])
    longest, second = lengths.topk(2).values.tolist()
    if not longest:
        return []
    live, times = lengths > DAMPED * longest, longest / max(second, 1e-30)
    few = int(live.sum()) <= max(1, MOST_LIVE * len(lengths)) and _gap(bias, live) >= BIAS_GAP
    first = lengths == longest
    apart = last and _apart(lengths, bias)
    if not few and times < ALONE and (times < LONGER or (_gap(bias, first) < SMALL_GAP and not apart)):
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


def _apart(lengths: Tensor, bias: Tensor) -> bool:
    """Whether, of many rows, one is far longer than all others, which does not come from its class being everywhere."""
    (longest, second), middle = lengths.topk(2).values, lengths.median()
    far = longest - second >= FAR * (second - middle)
    everywhere = bias.argmax() == lengths.argmax()
    return len(lengths) >= MANY_ROWS and bool(far & ~everywhere)


def _gap(bias: Tensor, live: Tensor) -> float:
    """How far the biases of the other rows, but for their lowest tenth, lie above those of the live ones."""
    others = bias[~live].sort().values
    return float(others[len(others) // 10] - bias[live].max()) if len(others) else 0.0
