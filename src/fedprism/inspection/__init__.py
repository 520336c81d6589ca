"""What a client can check in the model it was sent, before it trains: `inspect(params).require_clean()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fedprism import losses
from fedprism.errors import BadInput
from fedprism.inspection.aligned_rows import aligned_rows
from fedprism.inspection.base import Finding, Inspection, Layer, Severity, Suspicious, layers, serious_first
from fedprism.inspection.behaviour import behaviour
from fedprism.inspection.biases import extreme_biases
from fedprism.inspection.jumps import jumps
from fedprism.inspection.one_live_row import one_live_row
from fedprism.inspection.shares import changed_shares
from fedprism.inspection.single_entries import single_entries
from fedprism.inspection.values import not_finite, oversized, zero_dominated
from fedprism.types import Batch, LossFn, Update

__all__ = ["LAYER_CHECKS", "Finding", "Inspection", "Severity", "Suspicious", "changed_shares", "inspect"]

LAYER_CHECKS: dict[str, Callable[[Layer], Iterator[Finding]]] = {
    "aligned-rows": aligned_rows,
    "single-entries": single_entries,
    "one-live-row": one_live_row,
    "extreme-biases": extreme_biases,
    "zero-dominated": zero_dominated,
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

    reference: a model that the client trusts, such as the round before's. model, batch: its code, the client's samples.
    """
    if not params:
        raise BadInput("this file holds no tensors. Give the state dict of a model.")
    if (model is None) != (batch is None):
        raise BadInput("give the model's code and a batch together, or neither.")
    of_layers = [finding for layer in layers(params) for check in LAYER_CHECKS.values() for finding in check(layer)]
    of_layers.sort(key=lambda finding: list(LAYER_CHECKS).index(finding.check))
    findings = [*not_finite(params), *of_layers, *oversized(params)]
    if reference is not None:
        findings += jumps(params, reference)
    if model is not None and batch is not None and all(finding.check != "not-finite" for finding in findings):
        findings += behaviour(params, model, batch, losses.resolve(loss))
    return Inspection(serious_first(findings))
