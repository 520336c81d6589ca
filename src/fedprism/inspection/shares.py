"""How much of each tensor was changed: what somebody who holds the model of the round before can count."""

from __future__ import annotations

from fedprism.errors import BadInput
from fedprism.types import Update


def changed_shares(params: Update, reference: Update) -> dict[str, float]:
    """For each tensor of both: the share of its entries that differ from the reference's."""
    for name in params.keys() & reference.keys():
        if params[name].shape != reference[name].shape:
            raise BadInput(
                f"'{name}' has shape {tuple(params[name].shape)}, in the reference "
                f"{tuple(reference[name].shape)}. Compare models of one architecture."
            )
    return {
        name: float((tensor != reference[name]).double().mean()) if tensor.numel() else 0.0
        for name, tensor in params.items()
        if name in reference
    }
