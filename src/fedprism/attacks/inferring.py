"""The labels behind an update, read off its output layer (`solvers.label_counts`)."""

from __future__ import annotations

from fedprism import losses
from fedprism.attacks.structure import Trace
from fedprism.errors import NotApplicable
from fedprism.solvers.labels import LabelRecovery, label_counts
from fedprism.types import Observation, Round


def inferred_labels(observation: Observation, seen: Round, batch: int, network: Trace) -> LabelRecovery:
    """As many labels as there are samples; refuses where the update or the loss does not tell them."""
    last = network.output_layer()
    if last is None or last.weight not in seen.update:
        raise NotApplicable(
            "inferring labels expects a dense output layer in the update, found none; "
            'set labels="joint" or grant the labels.'
        )
    sign = -1.0 if seen.kind == "delta" else 1.0
    # Row sums of the weight gradient carry the same signs where the features are not negative.
    has_bias = last.bias is not None and last.bias in seen.update
    class_grad = seen.update[last.bias or ""] if has_bias else seen.update[last.weight].sum(1)
    known = observation.knowledge.loss
    loss = losses.name_of(known) if known is not None else None
    recovery = label_counts(sign * class_grad, batch, loss=loss or "unknown")
    if len(recovery.labels) != batch:
        raise NotApplicable(
            f"inferring labels expects softmax cross-entropy, found {loss or 'a loss of its own'}; "
            'set labels="joint" or grant the labels.'
        )
    return recovery
