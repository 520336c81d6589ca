"""Biases that decide by themselves: a class that always or never wins, a unit that is always or never active."""

from __future__ import annotations

from torch import Tensor

from fedprism.inspection.base import Finding, Layer, Severity, dense_widths, layers
from fedprism.types import Update

EXTREME = 50.0
"""No input of ordinary size moves a softmax or a sigmoid that far."""
OUTLYING = 8.0
TIMES_TYPICAL = 20.0
"""Biases set to the classes' frequencies are as far apart, but then all of them are."""


def extreme_biases(params: Update) -> list[Finding]:
    """Layers with a bias far from zero, and last layers with a bias far from the others.

    Inside a network one low bias is a unit that died; at its end it is a class that was switched off.
    """
    widths = dense_widths(params)
    found = []
    for layer in layers(params):
        if layer.bias is None or len(layer.bias) == 1:  # one output rules nothing out, and may be a price
            continue
        chosen = layer.bias.abs() > EXTREME
        if layer.is_last(widths):
            chosen |= _outlying(layer.bias)
        if bool(chosen.any()):
            found.append(_finding(layer, layer.bias, chosen))
    return found


def _outlying(bias: Tensor) -> Tensor:
    apart = (bias - bias.median()).abs()
    # The distance that three quarters of the biases keep: one class set apart does not change it.
    typical = apart.sort().values[3 * len(apart) // 4 if len(apart) > 3 else 0]
    return (apart > OUTLYING) & (apart > TIMES_TYPICAL * typical)


def _finding(layer: Layer, bias: Tensor, chosen: Tensor) -> Finding:
    count, middle = int(chosen.sum()), float(bias.median())
    largest = float(bias[bias.abs().mul(chosen).argmax()])
    return Finding(
        check="extreme-biases",
        severity=Severity.SERIOUS,
        tensor=layer.bias_name,
        sentence=(
            f"{count} of {len(bias)} biases lie far out (one is {largest:.3g}, the median {middle:.3g}): "
            "they decide whatever the input is"
        ),
        evidence={"extreme": count, "of": len(bias), "value": largest, "median": middle},
    )
