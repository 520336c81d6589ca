"""Checks of values alone: some not finite, nearly all zero in a layer, nearly all of a model in one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedprism.inspection.base import Finding, Layer, chunks, is_mask, note, serious
from fedprism.types import Update

MOSTLY_ZERO = 0.99
"""Fraction of zeros in a layer that is worth a note."""
FEWEST_LAYER_VALUES = 1000
"""Below it a fraction of zeros says little: a bound."""
MOST_OF_MODEL = 0.95
"""Fraction of all values in one dense layer that is worth a note."""
FEWEST_DENSE_VALUES = 2**20
"""Below it a dense layer is not large: a bound."""


def not_finite(params: Update) -> Iterator[Finding]:
    """NaN, infinity, or values too large for 32 bits, but in masks of attention, which are zeros and minus infinity."""
    for name, tensor in params.items():
        if tensor.dtype.is_floating_point:
            column = tensor.detach().reshape(-1, 1)
            count = sum(int((~torch.isfinite(chunk.float())).sum()) for chunk in chunks(column))
            if count and not is_mask(name, tensor):
                sentence = f"{count} of {tensor.numel()} values are NaN or infinite"
                yield serious("not-finite", name, sentence, {"values": count, "of": tensor.numel()})


def zero_dominated(layer: Layer) -> Iterator[Finding]:
    """Hardly a value that is not zero: pruned hard, or emptied around a trap. All zeros: not trained yet."""
    size = layer.rows.numel()
    zeros = 1 - int(torch.count_nonzero(layer.rows)) / size
    if MOSTLY_ZERO <= zeros < 1 and size >= FEWEST_LAYER_VALUES:
        evidence = {"share_of_zeros": zeros, "values": size}
        yield note("zero-dominated", layer.name, f"{zeros:.1%} of the values are zero", evidence)


def oversized(params: Update) -> Iterator[Finding]:
    """A dense layer that holds nearly all values, with room for every sample of a batch, as in small honest models."""
    sizes = {name: tensor.numel() for name, tensor in params.items()}
    dense = {name: tensor.shape for name, tensor in params.items() if tensor.dim() == 2}
    for name, (rows, inputs) in dense.items():
        fraction = sizes[name] / sum(sizes.values())
        if fraction >= MOST_OF_MODEL and sizes[name] >= FEWEST_DENSE_VALUES:
            sentence = f"it holds {fraction:.1%} of all values, and its gradient can carry {min(rows, inputs)} samples"
            yield note("oversized", name, sentence, {"share": fraction, "rows": rows, "inputs": inputs})
