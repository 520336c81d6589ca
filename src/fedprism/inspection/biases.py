"""Biases that decide by themselves: a class that always or never wins, a unit that is always or never active."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedprism.inspection.base import Finding, Layer, serious

EXTREME_BIAS = 50.0
"""In nats: no input of ordinary size moves a softmax or a sigmoid that far."""
OUTLYING_BIAS = 8.0
"""In nats from the median of a last layer: e^8 is about 3,000 times as likely."""
TIMES_TYPICAL = 20.0
"""An outlying bias is this many times the usual distance away; classes' frequencies spread all biases."""


def extreme_biases(layer: Layer) -> Iterator[Finding]:
    """A bias far from zero or, in a last layer, far from the others: a class that was switched off."""
    bias = layer.bias
    if bias is None or len(bias) == 1:  # one output rules nothing out, and may be a price
        return
    chosen = bias.abs() > EXTREME_BIAS
    if layer.last:
        chosen |= _outlying(bias)
    count, middle = int(chosen.sum()), float(bias.median())
    if count:
        largest = float(bias[bias.abs().mul(chosen).argmax()])
        yield serious(
            "extreme-biases",
            layer.bias_name,
            f"{count} of {len(bias)} biases are far out (one is {largest:.3g}, the median {middle:.3g}): "
            "they decide whatever the input is",
            {"extreme": count, "of": len(bias), "value": largest, "median": middle},
        )


def _outlying(bias: Tensor) -> Tensor:
    apart = (bias - bias.median()).abs()
    # The distance that three quarters of the biases keep: one class set apart does not change it.
    typical = apart.sort().values[3 * len(apart) // 4 if len(apart) > 3 else 0]
    return (apart > OUTLYING_BIAS) & (apart > TIMES_TYPICAL * typical)
