"""Sign and kind of an observed update, in one place: what it says about the gradient of one client's batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprism.client.update import FedAvg, trained_update
from fedprism.errors import MissingKnowledge
from fedprism.optimizers import SGD
from fedprism.types import Knowledge, Round, Update


def direction(round: Round, knowledge: Knowledge | None = None) -> Update:
    """The update pointing along the gradient: a delta, which points against it, is negated.

    Where weight decay is known, what it alone moved is taken out of a delta first.
    """
    if round.kind == "gradient":
        return round.update
    moved = moved_by_decay(round, knowledge or Knowledge())
    return {name: -_without(tensor, moved.get(name), round.params[name]) for name, tensor in round.update.items()}


def mean_update(round: Round) -> Update:
    """The mean of the updates of the clients behind a round."""
    if round.reduction != "sum" or round.clients == 1:
        return round.update
    factor = _mean_factor(round)
    return {name: factor * tensor for name, tensor in round.update.items()}


def adds_gradients(round: Round, knowledge: Knowledge) -> bool | None:
    """Whether an update is a weighted sum of gradients, weight decay aside; None if the optimizer is not known."""
    if round.kind == "gradient":
        return True
    return None if knowledge.local_optimizer is None else knowledge.local_optimizer.adds_gradients


def is_batch_gradient(round: Round, knowledge: Knowledge) -> bool:
    """Whether the update may be a multiple of one gradient: clients sent it, or each took one step, as is known."""
    if round.kind == "gradient":
        return True
    return adds_gradients(round, knowledge) is not False and local_steps(round, knowledge) == 1


def local_steps(round: Round, knowledge: Knowledge) -> int | None:
    """How many local steps each client took, on equal parts of the batch; None where that is unknown."""
    size, step_size = knowledge.batch_size, knowledge.local_batch_size
    if not (isinstance(size, int) and size > 0 and step_size and round.clients and knowledge.local_epochs):
        return None
    return knowledge.local_epochs * math.ceil(size / round.clients / step_size)


def known_training(knowledge: Knowledge, purpose: str, *, steps: int | None) -> FedAvg:
    """Local training as it is known, in the order of the data; what is needed and not known is a MissingKnowledge.

    `steps`: how many each client takes, if that is known. Momentum says nothing about a single step.
    """
    lr, optimizer, momentum = knowledge.local_lr, knowledge.local_optimizer, knowledge.local_momentum
    if lr is None or optimizer is None:
        raise MissingKnowledge(purpose, "local_lr" if lr is None else "local_optimizer")
    ahead = isinstance(optimizer, SGD) and optimizer.nesterov
    if momentum is None and optimizer.takes_momentum and (steps != 1 or ahead):
        raise MissingKnowledge(purpose, "local_momentum")
    return FedAvg(
        lr=lr,
        epochs=knowledge.local_epochs or 1,
        batch_size=knowledge.local_batch_size,
        momentum=momentum or 0.0,
        optimizer=optimizer,
        shuffle=False,
    )


def moved_by_decay(round: Round, knowledge: Knowledge) -> Update:
    """How known weight decay alone moves the parameters; empty where there is none or its steps are not known.

    With SGD the rest of a delta is a weighted sum of gradients. With any optimizer the rest is zero in entries that
    never had a gradient.
    """
    steps, optimizer = local_steps(round, knowledge), knowledge.local_optimizer
    if steps is None or optimizer is None or not optimizer.weight_decay:
        return {}
    try:
        protocol = known_training(knowledge, "taking weight decay out", steps=steps)
    except MissingKnowledge:
        return {}
    start = {name: round.params[name].detach() for name in round.update}
    nothing = {name: torch.zeros_like(p) for name, p in start.items()}
    moved = trained_update(start, lambda *_: nothing, [torch.empty(0)] * steps, protocol)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in moved.values()):
        return {}
    clients = round.clients if round.reduction == "sum" else 1
    return {name: clients * tensor.detach() for name, tensor in moved.items()}


def as_gradient(delta: Update, lr: float) -> Update:
    """The gradient of the one local step at rate `lr` that a delta is."""
    return {name: tensor / -lr for name, tensor in delta.items()}


def as_delta(gradient: Update, lr: float) -> Update:
    """What one local step at rate `lr` along a gradient adds to the parameters."""
    return {name: -lr * tensor for name, tensor in gradient.items()}


def _mean_factor(round: Round) -> float:
    """What the update is multiplied by to be the mean over its clients."""
    return 1.0 / round.clients if round.reduction == "sum" else 1.0


DECAY_ROUNDING = 4.0
"""How many times the precision of a parameter may be left of what weight decay moved: of each step and difference."""


def _without(update: Tensor, moved: Tensor | None, params: Tensor) -> Tensor:
    """The update less what was moved; what remains within the rounding of the parameters is nothing."""
    if moved is None:
        return update
    rest = update - moved
    return torch.where(rest.abs() <= DECAY_ROUNDING * torch.finfo(params.dtype).eps * params.abs(), 0.0, rest)
