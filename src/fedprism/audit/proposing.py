"""Strengths of defenses that make sense for a model: relative to the updates that its clients send."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import torch

from fedprism.audit.materials import Materials, Setup
from fedprism.audit.plan import parse_plan
from fedprism.audit.template import USUAL, Strengths, text
from fedprism.client.update import FedSGD, local_update
from fedprism.errors import FedprismError
from fedprism.losses import cross_entropy
from fedprism.randomness import generator

PROBED = 9
"""Updates that are measured: enough for a median of one or two digits."""
BATCH = 8
"""Samples behind a measured update, as in the plan that is written."""


def proposed(model: str | None, data: str | None, base: Path) -> str:
    """A plan for this model and data; paths start at `base`."""
    plan = text(model, data)
    try:
        strengths = measured(Setup(parse_plan(plan), base).materials())
    except FedprismError:
        return plan  # the model or the data are not there yet; the plan says that nothing was measured
    return text(model, data, strengths)


def measured(materials: Materials) -> Strengths:
    """Lengths of a few updates of the model, on the data that clients hold."""
    batches = [_lengths(materials, number, BATCH) for number in range(PROBED)]
    singles = [_lengths(materials, number, 1) for number in range(PROBED)]
    update = statistics.median(length for length, _ in batches)
    entries = batches[0][1]
    if not 0 < update < math.inf:
        return USUAL
    return Strengths(
        update=_rounded(update),
        sample=_rounded(statistics.median(length for length, _ in singles)),
        entry=_rounded(update / math.sqrt(entries)),
        origin=f"measured: the median update has the length {update:.2g} over {entries:,} entries",
    )


def _lengths(materials: Materials, number: int, size: int) -> tuple[float, int]:
    """The length of one update, and its entries."""
    assert materials.samples is not None
    rng = generator(number, "proposal")
    drawn = torch.randperm(len(materials.samples), generator=rng)[:size]
    model = materials.network(0)
    params = dict(model.named_parameters())
    update = local_update(model, params, materials.batch(drawn), loss=cross_entropy, protocol=FedSGD(), rng=rng).update
    squares = sum(float(tensor.double().square().sum()) for tensor in update.values())
    return math.sqrt(squares), sum(tensor.numel() for tensor in update.values())


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
