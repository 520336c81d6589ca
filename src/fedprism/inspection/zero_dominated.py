"""Layers that are almost all zeros: pruned hard, or emptied around what a trap needs. A note, for both happen."""

from __future__ import annotations

import torch

from fedprism.inspection.base import Finding, Severity, layers
from fedprism.types import Update

ZEROS = 0.99
FEWEST_VALUES = 1000


def zero_dominated(params: Update) -> list[Finding]:
    """Layers with hardly a value that is not zero. A layer of zeros alone is one that has not been trained yet."""
    found = []
    for layer in layers(params):
        zeros = 1 - int(torch.count_nonzero(layer.rows)) / layer.rows.numel()
        if ZEROS <= zeros < 1 and layer.rows.numel() >= FEWEST_VALUES:
            found.append(
                Finding(
                    check="zero-dominated",
                    severity=Severity.NOTE,
                    tensor=layer.name,
                    sentence=f"{zeros:.1%} of the values are zero",
                    evidence={"share_of_zeros": zeros, "values": layer.rows.numel()},
                )
            )
    return found
