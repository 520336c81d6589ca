"""A dense layer that is nearly the whole model: it has room to write down every sample of a large batch."""

from __future__ import annotations

from fedprism.inspection.base import Finding, Severity
from fedprism.types import Update

SHARE = 0.95
FEWEST_VALUES = 2**20


def oversized(params: Update) -> list[Finding]:
    """The dense layer that holds nearly all values, if there is one. Small honest models have it too: a note."""
    sizes = {name: tensor.numel() for name, tensor in params.items()}
    dense = {name: tensor.shape for name, tensor in params.items() if tensor.dim() == 2}
    found = []
    for name, (rows, inputs) in dense.items():
        share = sizes[name] / sum(sizes.values())
        if share >= SHARE and sizes[name] >= FEWEST_VALUES:
            sentence = f"it holds {share:.1%} of all values, and its gradient can carry {min(rows, inputs)} samples"
            found.append(
                Finding(
                    check="oversized",
                    severity=Severity.NOTE,
                    tensor=name,
                    sentence=sentence,
                    evidence={"share": share, "rows": rows, "inputs": inputs},
                )
            )
    return found
