"""A last layer through which one class answers alone.

Class fishing zeroes (or damps) the rows of all classes but one and sets their biases above anything that the live row
can reach. Rows that pruning or weight decay emptied have no such biases.
"""

from __future__ import annotations

import torch

from fedprism.inspection.base import Finding, Layer, Severity, layers, parts, unit_rows
from fedprism.types import Update

DAMPED = 0.2
"""Rows shorter than this, relative to the longest, count as silent."""
MOST_LIVE = 0.25
SILENT = 0.02
"""Where all rows but one are shorter than this, biases need not be looked at: no layer is pruned to one unit."""
BIAS_GAP = 3.0
"""In nats, if it is the last layer: at this gap a class keeps 5 % of its probability."""
FEWEST_ROWS = 4


def one_live_row(params: Update) -> list[Finding]:
    """Dense layers in which most rows are silent, with biases above the live ones', or all but one."""
    found = []
    for layer in layers(params):
        if not layer.convolution and layer.bias is not None and len(layer.rows) >= FEWEST_ROWS:
            found += _fishing(layer)
    return found


def _fishing(layer: Layer) -> list[Finding]:
    assert layer.bias is not None
    lengths = torch.cat([unit_rows(part)[1] for part in parts(layer.rows)])
    live = lengths > DAMPED * lengths.max()
    if not bool(live.any()) or int(live.sum()) > max(1, MOST_LIVE * len(lengths)):
        return []
    silent_biases = layer.bias[~live].sort().values
    gap = float(silent_biases[len(silent_biases) // 10] - layer.bias[live].max())
    alone = int((lengths > SILENT * lengths.max()).sum()) == 1
    if gap < BIAS_GAP and not alone:
        return []
    silent = len(silent_biases)
    return [
        Finding(
            check="one-live-row",
            severity=Severity.SERIOUS,
            tensor=layer.name,
            sentence=(
                f"{silent} of {len(lengths)} rows are silent, with biases {gap:.3g} above the live ones': only samples "
                f"of class {int(lengths.argmax())} would answer"
            ),
            evidence={"silent_rows": silent, "rows": len(lengths), "bias_gap": gap, "class": int(lengths.argmax())},
        )
    ]
