"""What clients step with: SGD, Adam and AdamW as torch.optim defines them, by name, and differentiable.

Every rule works entry by entry, so that tensors may carry a leading dimension of clients. The learning rate and SGD's
momentum belong to the training (`local_lr`, `local_momentum`); everything else about the steps is in the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.naming import EvaluableRepr

SMALLEST_EPSILON = 1e-30
"""Of Adam: with none at all, entries without a gradient would be divided by zero; far above what underflows."""

Tensors = Mapping[str, Tensor]
State = Mapping[str, Tensors]
"""What an optimizer keeps from step to step: a name -> one tensor per parameter."""


class LocalOptimizer(EvaluableRepr):
    """How a gradient becomes a step. Subclasses are frozen dataclasses of scalars."""

    weight_decay: float
    takes_momentum = False
    """Whether the training's momentum is part of it."""
    adds_gradients = False
    """Whether several steps add up to a weighted sum of gradients; others scale each entry by its own history."""
    tensors_kept = 0
    """How many tensors per parameter it keeps between two steps, momentum included."""

    def step(
        self, params: Tensors, gradient: Tensors, state: State, *, number: int, lr: float, momentum: float
    ) -> tuple[dict[str, Tensor], State]:
        """The parameters after the step of this number, counted from 0, and what is kept for the next."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class SGD(LocalOptimizer):
    """Gradient descent, with the training's momentum. Weight decay is added to the gradient."""

    nesterov: bool = False
    weight_decay: float = 0.0

    takes_momentum = True
    adds_gradients = True
    tensors_kept = 1

    def __post_init__(self) -> None:
        _check(self, weight_decay=(0, math.inf))
        if not isinstance(self.nesterov, bool):
            raise BadInput(f"nesterov must be True or False, not {shown(self.nesterov)}.")

    def step(
        self, params: Tensors, gradient: Tensors, state: State, *, number: int, lr: float, momentum: float
    ) -> tuple[dict[str, Tensor], State]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        if not momentum:
            return {name: p - lr * gradient[name] for name, p in params.items()}, {}
        before = state.get("velocity")
        velocity = gradient if before is None else {name: momentum * before[name] + g for name, g in gradient.items()}
        ahead = {name: g + momentum * velocity[name] for name, g in gradient.items()} if self.nesterov else velocity
        return {name: p - lr * ahead[name] for name, p in params.items()}, {"velocity": velocity}


@dataclass(frozen=True, kw_only=True, repr=False)
class Adam(LocalOptimizer):
    """Kingma, Ba, "Adam", ICLR 2015. Weight decay is added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    tensors_kept = 2

    def __post_init__(self) -> None:
        _check(self, beta1=(0, 1), beta2=(0, 1), epsilon=(SMALLEST_EPSILON, math.inf), weight_decay=(0, math.inf))

    def step(
        self, params: Tensors, gradient: Tensors, state: State, *, number: int, lr: float, momentum: float
    ) -> tuple[dict[str, Tensor], State]:
        return self._adapted(params, _with_decay(gradient, params, self.weight_decay), state, number, lr)

    def _adapted(
        self, params: Tensors, gradient: Tensors, state: State, number: int, lr: float
    ) -> tuple[dict[str, Tensor], State]:
        first, second = state.get("first"), state.get("second")
        mean = {name: _blend(first, name, g, self.beta1) for name, g in gradient.items()}
        square = {name: _blend(second, name, g * g, self.beta2) for name, g in gradient.items()}
        # Early means are too small by these factors, because both start from zero.
        of_mean, of_square = 1 - self.beta1 ** (number + 1), 1 - self.beta2 ** (number + 1)
        after = {
            name: p - (lr / of_mean) * mean[name] / (_root(square[name]) / math.sqrt(of_square) + self.epsilon)
            for name, p in params.items()
        }
        return after, {"first": mean, "second": square}


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamW(Adam):
    """Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019: parameters shrink beside the step."""

    weight_decay: float = 0.01

    def step(
        self, params: Tensors, gradient: Tensors, state: State, *, number: int, lr: float, momentum: float
    ) -> tuple[dict[str, Tensor], State]:
        shrunk = {name: p * (1 - lr * self.weight_decay) for name, p in params.items()}
        return self._adapted(shrunk, gradient, state, number, lr)


OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def name_of(optimizer: LocalOptimizer) -> str:
    """The name of an optimizer in `OPTIMIZERS`."""
    return next(name for name, kind in OPTIMIZERS.items() if kind is type(optimizer))


def knowledge_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a torch optimizer says of local training, as fields of `Knowledge`; what cannot be repeated is refused."""
    kind = next((kind for kind in (SGD, Adam, AdamW) if type(optimizer).__name__ == kind.__name__), None)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if kind is None or any(group != settings[0] for group in settings[1:]):
        found = type(optimizer).__name__ if kind is None else "parameter groups that differ in their settings"
        raise BadInput(
            "only torch's SGD, Adam and AdamW with the same settings for all parameters are known, not "
            f"{found}. State local_lr and local_optimizer yourself, or leave them out."
        )
    group = settings[0]
    if odd := [key for key in ("dampening", "amsgrad", "maximize") if group.get(key)]:
        raise BadInput(f"optimizers with {odd[0]}={group[odd[0]]} are not supported. Leave local_optimizer out.")
    known = {"local_lr": float(group["lr"]), "local_momentum": float(group.get("momentum", 0.0))}
    decay = float(group["weight_decay"])
    if kind is SGD:
        return {**known, "local_optimizer": SGD(nesterov=bool(group["nesterov"]), weight_decay=decay)}
    beta1, beta2 = group["betas"]
    made = kind(beta1=float(beta1), beta2=float(beta2), epsilon=float(group["eps"]), weight_decay=decay)  # type: ignore[call-arg]
    return {**known, "local_optimizer": made}


def _with_decay(gradient: Tensors, params: Tensors, decay: float) -> Tensors:
    return {name: g + decay * params[name] for name, g in gradient.items()} if decay else gradient


def _blend(before: Tensors | None, name: str, value: Tensor, beta: float) -> Tensor:
    """A running mean that starts from zero."""
    return (1 - beta) * value if before is None else beta * before[name] + (1 - beta) * value


def _root(square: Tensor) -> Tensor:
    """The square root, with slope zero at zero: an entry without a gradient must not make the whole slope NaN."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _check(optimizer: Any, **ranges: tuple[float, float]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(optimizer, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            wanted = f"from {low:g} up to, but not including, {high:g}" if high < math.inf else f"of at least {low:g}"
            raise BadInput(f"{name} must be a number {wanted}, not {shown(value)}. torch's default is common.")
