"""What a client can check in the model it was sent, before it trains: `inspect(params).require_clean()`.

`CHECKS` look at parameters alone. With a reference (the round before) and with the model's code and a batch of the
client's own, `inspect` looks at what changed and at what the model does as well.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedprism import losses
from fedprism.errors import BadInput
from fedprism.inspection.aligned_rows import aligned_rows
from fedprism.inspection.base import Finding, Inspection, Severity, Suspicious
from fedprism.inspection.behaviour import behaviour
from fedprism.inspection.biases import extreme_biases
from fedprism.inspection.finite import not_finite
from fedprism.inspection.jumps import jumps
from fedprism.inspection.one_live_row import one_live_row
from fedprism.inspection.oversized import oversized
from fedprism.inspection.single_entries import single_entries
from fedprism.inspection.zero_dominated import zero_dominated
from fedprism.types import Batch, LossFn, Update

__all__ = ["CHECKS", "Finding", "Inspection", "Severity", "Suspicious", "inspect"]

CHECKS: dict[str, Callable[[Update], list[Finding]]] = {
    "not-finite": not_finite,
    "aligned-rows": aligned_rows,
    "single-entries": single_entries,
    "one-live-row": one_live_row,
    "extreme-biases": extreme_biases,
    "zero-dominated": zero_dominated,
    "oversized": oversized,
}


def inspect(
    params: Update,
    *,
    reference: Update | None = None,
    model: nn.Module | None = None,
    batch: Batch | None = None,
    loss: str | LossFn = "cross_entropy",
) -> Inspection:
    """Look at a state dict, or a lazy view of one. Nothing is changed, and no random state is touched.

    reference: the model of the round before, or any that the client trusts. model and batch, given together: the
    model's code and samples of the client's own, on which its outputs and gradients are looked at.
    """
    if not params:
        raise BadInput("expected a model with at least one tensor, found none; give its state dict.")
    if (model is None) != (batch is None):
        raise BadInput("expected the model's code and a batch together, found only one of them; give both or neither.")
    found = [finding for check in CHECKS.values() for finding in check(params)]
    if reference is not None:
        found += jumps(params, reference)
    if model is not None and batch is not None and all(finding.check != "not-finite" for finding in found):
        found += behaviour(params, model, batch, losses.resolve(loss))
    return Inspection(tuple(sorted(found, key=lambda finding: finding.severity is not Severity.SERIOUS)))
