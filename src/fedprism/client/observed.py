"""Sign and kind of an observed update, in one place: what it says about the gradient of one client's batch."""

from __future__ import annotations

import math

from fedprism.types import Knowledge, Round, Update


def direction(round: Round) -> Update:
    """The update pointing along the gradient: a delta, which points against it, is negated."""
    return round.update if round.kind == "gradient" else {name: -tensor for name, tensor in round.update.items()}


def mean_update(round: Round) -> Update:
    """The mean of the updates of the clients behind a round."""
    if round.reduction != "sum" or round.clients == 1:
        return round.update
    factor = _mean_factor(round)
    return {name: factor * tensor for name, tensor in round.update.items()}


def is_batch_gradient(round: Round, knowledge: Knowledge) -> bool:
    """Whether the update is a multiple of one gradient: clients sent it, or each is known to have taken one step."""
    return round.kind == "gradient" or local_steps(round, knowledge) == 1


def local_steps(round: Round, knowledge: Knowledge) -> int | None:
    """How many local steps each client took, on equal parts of the batch; None where that is unknown."""
    size, step_size = knowledge.batch_size, knowledge.local_batch_size
    if not (isinstance(size, int) and size > 0 and step_size and round.clients and knowledge.local_epochs):
        return None
    return knowledge.local_epochs * math.ceil(size / round.clients / step_size)


def as_gradient(delta: Update, lr: float) -> Update:
    """The gradient of the one local step at rate `lr` that a delta is."""
    return {name: tensor / -lr for name, tensor in delta.items()}


def as_delta(gradient: Update, lr: float) -> Update:
    """What one local step at rate `lr` along a gradient adds to the parameters."""
    return {name: -lr * tensor for name, tensor in gradient.items()}


def _mean_factor(round: Round) -> float:
    """What the update is multiplied by to be the mean over its clients."""
    return 1.0 / round.clients if round.reduction == "sum" else 1.0
