"""Strengths of defenses that make sense for a model: relative to the updates that its clients send."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from pathlib import Path

import torch

from fedprism.audit.materials import Materials, Setup
from fedprism.audit.plan import UtilityPart, parse_plan
from fedprism.audit.template import USUAL, USUAL_LOSS, Strengths, text
from fedprism.client.update import FedSGD, local_update
from fedprism.errors import FedprismError
from fedprism.losses import resolve
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.randomness import generator
from fedprism.simulation.scenario import check_fits
from fedprism.types import is_soft

PROBED = 9
"""Updates that are measured: enough for a median of one or two digits."""
FEWEST_STEPS = 30
"""Steps of training from which accuracies can differ: 5 passes over the embedded photographs."""
BATCH = 8
"""Samples behind a measured update, as in the plan that is written."""


def proposed(model: str | None, data: str | None, base: Path, loss: str | None = None) -> str:
    """A plan for this model and data; paths start at `base`. Without a loss, one that fits the labels is chosen."""
    plan = text(model, data, loss=loss or USUAL_LOSS)
    try:
        materials = Setup(parse_plan(plan), base).materials()
        chosen = loss or fitting_loss(materials)
        return text(model, data, measured(materials, chosen), chosen)
    except FedprismError:
        return plan  # the model or the data are not there yet; the plan says that nothing was measured


def fitting_loss(materials: Materials) -> str:
    """The first of the losses of the table that the model and the labels fit."""
    assert materials.samples is not None
    everything = materials.batch(torch.arange(len(materials.samples)))
    yes_or_no = bool(((everything.labels == 0) | (everything.labels == 1)).all())
    # Squared errors of class numbers and binary cross-entropy of any number would be accepted, too.
    candidates = [USUAL_LOSS, *(["binary_cross_entropy"] if yes_or_no else []), "mse"]
    if is_soft(everything.labels) and yes_or_no and not bool((everything.labels.sum(1) == 1).all()):
        candidates.remove(USUAL_LOSS)  # several labels per sample, no weights of classes
    for name in candidates[:-1]:
        with suppress(FedprismError):
            check_fits(materials.network(0), everything, 0, name)
            return name
    return candidates[-1]


def measured(materials: Materials, loss: str = USUAL_LOSS) -> Strengths:
    """Lengths of a few updates of the model, on the data that clients hold."""
    batches = [_lengths(materials, loss, number, BATCH) for number in range(PROBED)]
    least_batch = 1
    try:
        singles = [_lengths(materials, loss, number, 1) for number in range(PROBED)]
    except FedprismError:  # some batch norm accepts no single sample
        singles, least_batch = batches, 2
    update = statistics.median(length for length, _ in batches)
    entries = batches[0][1]
    if not 0 < update < math.inf:
        return USUAL
    return Strengths(
        update=_rounded(update),
        sample=_rounded(statistics.median(length for length, _ in singles)),
        entry=_rounded(update / math.sqrt(entries)),
        origin=f"measured: the median update has the length {update:.2g} over {entries:,} entries",
        mixes_examples=bool(batchnorm_layers(materials.network(0))),
        least_batch=least_batch,
        epochs=_epochs(materials),
        bounds=materials.other_bounds(),
    )


def _lengths(materials: Materials, loss: str, number: int, size: int) -> tuple[float, int]:
    """The length of one update, and its entries."""
    assert materials.samples is not None
    rng = generator(number, "proposal")
    drawn = torch.randperm(len(materials.samples), generator=rng)[:size]
    model, function = materials.network(0), resolve(materials.loss(loss))
    params = dict(model.named_parameters())
    update = local_update(model, params, materials.batch(drawn), loss=function, protocol=FedSGD(), rng=rng).update
    squares = sum(float(tensor.double().square().sum()) for tensor in update.values())
    return math.sqrt(squares), sum(tensor.numel() for tensor in update.values())


def _epochs(materials: Materials) -> int:
    """As many passes as take the fewest steps, with the batches and the share of test data that plans have."""
    assert materials.samples is not None
    usual = UtilityPart()
    steps = max(1, round((1 - usual.test) * len(materials.samples)) // usual.batch_size)
    return max(USUAL.epochs, math.ceil(FEWEST_STEPS / steps))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
