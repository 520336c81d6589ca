"""A last layer through which one class answers alone.

Class fishing silences the rows of all classes but one and sets their biases above anything that the live row can reach.
Pruning or weight decay leaves no such biases, and a rare class has a low bias but a short row. Among a hundred classes
no bias is needed; then one row is far longer than all others, and its bias is not the highest, as a common class's is.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedprism.inspection.base import Finding, Layer, serious

DAMPED = 0.2
"""Rows shorter than this, relative to the longest, count as silent."""
MOST_LIVE = 0.25
"""Fraction of the rows that may be live where the others are silent."""
BIAS_GAP = 3.0
"""In nats, if it is the last layer: at this gap a class keeps 5 % of its probability."""
LONGER = 1.7
"""How many times the next row's length a row with a low bias is: each is rare, both together are made."""
SMALL_GAP = 0.7
"""In nats: how far such a row's bias is below the others'; at this gap a class is half as likely."""
ALONE = 8.0
"""Where one row of a last layer is this much longer than any other, its bias need only not be the highest."""
EMPTY = 1e3
"""Where it is this much longer, its bias may be anything, if the row has not been pruned itself."""
LEAST_KEPT = 0.1
"""Fraction of entries that are not zero in a row that counts as not pruned."""
FEWEST_ROWS = 2
"""A single row has no others to stand out from."""
FEWEST_ENTRIES = 8
"""Lengths of rows with fewer entries differ by chance."""
SOME_ROWS = 4
"""Fewer rows than this have to be silent, not only shorter."""
MANY_ROWS = 100
"""From this many classes on, lengths alone tell: they are many."""
FAR = 4.0
"""The longest row is beyond the next one by this many times what that one is beyond the median."""


def one_live_row(layer: Layer) -> Iterator[Finding]:
    """Most rows are silent, with biases above the live ones', or one row drowns all others."""
    bias, enough = layer.bias, len(layer.rows) >= FEWEST_ROWS and layer.rows.shape[1] >= FEWEST_ENTRIES
    if layer.convolution or bias is None or not enough:
        return
    lengths = layer.lengths()
    longest, second = lengths.topk(2).values.tolist()
    if not longest:
        return
    live, times, target = lengths > DAMPED * longest, longest / max(second, 1e-30), int(lengths.argmax())
    few = int(live.sum()) <= max(1, MOST_LIVE * len(lengths)) and _gap(bias, live) >= BIAS_GAP
    answering = live if few else lengths == longest
    if not few and not _drowns(layer, bias, lengths, times):
        return
    gap, silent = _gap(bias, answering), int((~answering).sum())
    yield serious(
        "one-live-row",
        layer.name,
        f"{silent} of {len(lengths)} rows are silent or damped ({times:.3g} times shorter than the longest), "
        f"with biases {gap:.3g} above its: samples of class {target} would answer almost alone",
        {"silent_rows": silent, "rows": len(lengths), "times_longer": times, "bias_gap": gap, "class": target},
    )


def _drowns(layer: Layer, bias: Tensor, lengths: Tensor, times: float) -> bool:
    """Whether the longest row, `times` longer than the next one, drowns all others, whose biases help it."""
    target = lengths.argmax()
    everywhere = bool(bias.argmax() == target)
    kept = int(layer.rows[target].count_nonzero()) >= LEAST_KEPT * layer.rows.shape[1]
    if layer.last and kept and times >= (EMPTY if everywhere else ALONE):
        return True
    apart = layer.last and not everywhere and _apart(lengths)
    longer = len(lengths) >= SOME_ROWS and times >= LONGER
    return longer and (apart or _gap(bias, lengths == lengths.max()) >= SMALL_GAP)


def _apart(lengths: Tensor) -> bool:
    """Whether, of many rows, one is far longer than all others."""
    (longest, second), middle = lengths.topk(2).values, lengths.median()
    return len(lengths) >= MANY_ROWS and bool(longest - second >= FAR * (second - middle))


def _gap(bias: Tensor, live: Tensor) -> float:
    """How far the biases of the other rows, but for their lowest tenth, lie above those of the live ones."""
    others = bias[~live].sort().values
    return float(others[len(others) // 10] - bias[live].max()) if len(others) else 0.0
