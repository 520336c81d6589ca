"""Gradient matching without second derivatives: the slope as a difference of two gradients by the inputs.

How the gradient by the weights changes with the inputs, along a direction v, is how the gradient by the inputs changes
with the weights along v: both are the same mixed derivative of the loss. So it is the difference of two ordinary
gradients by the inputs, at the weights and a small step along v from them: five passes through the network, where
differentiating twice takes seven, and none of them is recorded to be differentiated again.

The network has to be smooth between the two, so its kinks are held (`runtime.replay`). In float32 the slope is some
tenths of a percent off, and one in some hundred of its signs, those that hardly count: enough to step along them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.runtime.replay import Kinks, first_nonsmooth_op
from fedprism.solvers.matching.distances import Gradients, Slope
from fedprism.solvers.matching.objective import Prior, Variables, penalised, penalty_of, pieces, slopes_along

STEP = 1e-3
"""Step of the weights over the length of the tensor that moves most; smaller ones lose more digits to rounding."""
ROUGH_STEP = 1e-2
"""The same step where products are rounded to TF32, whose 10 bits of mantissa need a longer one."""
SMALLEST_WEIGHT = 1e-2
"""Lower bound of a tensor's root mean square, in units of its weights: biases may all be zero."""
ALL = slice(None)

Loss = Callable[[Tensor, Tensor | None, slice], Tensor]


class TwoLosses(NamedTuple):
    """A client's loss of (inputs, label_logits, which samples these are), and that with `moved` in place of `weights`.

    sent_of(gradients by the weights, inputs, label_logits) is what is sent of them, differentiable by the gradients;
    None: they themselves. kinked: whether there are kinks to be held, which `check_kinks` tells. together: so many
    samples are worked on at a time, which a loss that is their mean and a sent_of of None allow; None: all.
    """

    loss: Loss
    moved_loss: Loss
    weights: Sequence[Tensor]
    moved: Sequence[Tensor]
    sent_of: Callable[[Gradients, Tensor, Tensor | None], Gradients] | None = None
    kinked: bool = True
    together: int | None = None


class KinkCheck(NamedTuple):
    """refusal: why no difference may be taken, empty where one may. kinked: whether there are kinks to be held."""

    refusal: str
    kinked: bool


def check_kinks(losses: TwoLosses, inputs: Tensor, logits: Tensor | None) -> KinkCheck:
    """Look for kinks in one pass through each of the losses."""
    kinks = Kinks()
    with kinks.keeping():
        losses.loss(inputs, logits, ALL)
    kinked = bool(kinks.kept)
    with kinks.repeating():
        repeated = losses.moved_loss(inputs.detach().requires_grad_(), logits, ALL)
    refusal = "the network compares or draws" if kinks.chooses else first_nonsmooth_op(repeated)
    return KinkCheck(refusal, kinked)


@dataclass(frozen=True)
class Differenced(Variables):
    """The objective and its slope from two losses."""

    losses: TwoLosses
    slope_of: Callable[[Gradients], Slope]
    priors: tuple[Prior, ...] = ()
    step: float = STEP
    kinks: Kinks = field(default_factory=Kinks, init=False)

    @cached_property
    def lengths(self) -> Tensor:
        weights = [weight.detach() for weight in self.losses.weights]
        lengths = torch.stack(torch._foreach_norm(weights))
        return lengths.maximum(lengths.new_tensor([SMALLEST_WEIGHT * weight.numel() ** 0.5 for weight in weights]))

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        before, gradients, penalty = self._first_pass()
        value, scale, direction = self._slope(gradients)
        step = self._move(direction)
        after = self._second_pass()
        slopes = [(there - here) * (scale / step) for here, there in zip(before, after, strict=True)]
        if self.priors:
            penalty = penalty_of(self.priors, self.inputs) if penalty is None else penalty
            value = value + penalised(penalty, self.inputs, slopes)
        return value, slopes

    def _first_pass(self) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The gradients by the variables, those by the weights, and the penalty where it may need this pass's graph."""
        losses, penalty = self.losses, None
        total, by_variables = list[Tensor](), list[Sequence[Tensor]]()
        for which, fraction in self._chunks():
            chunk = self if self.whole else self.part(which)
            with self.kinks.keeping() if self.whole and losses.kinked else nullcontext():
                loss = fraction * losses.loss(chunk.inputs, chunk.logits, which)
            if self.whole and self.priors:  # a prior may look at what this pass has fed to layers
                penalty = penalty_of(self.priors, self.inputs)
            wanted, count = [*chunk.variables, *losses.weights], len(chunk.variables)
            gradients = torch.autograd.grad(loss, wanted, retain_graph=penalty is not None, materialize_grads=True)
            by_variables.append(gradients[:count])
            _add_up(total, gradients[count:])
        return _joined(by_variables), total, penalty

    def _second_pass(self) -> list[Tensor]:
        """The gradients by the variables at the moved weights."""
        losses, by_variables = self.losses, list[Sequence[Tensor]]()
        for which, fraction in self._chunks():
            chunk = self if self.whole else self.part(which)
            if losses.kinked and not self.whole:
                with torch.no_grad(), self.kinks.keeping():
                    losses.loss(chunk.inputs, chunk.logits, which)
            with self.kinks.repeating() if losses.kinked else nullcontext():
                moved_loss = fraction * losses.moved_loss(chunk.inputs, chunk.logits, which)
            by_variables.append(torch.autograd.grad(moved_loss, chunk.variables))
        return _joined(by_variables)

    def value(self) -> Tensor:
        """Without the derivative, at about half the cost."""
        total = list[Tensor]()
        for which, fraction in self._chunks():
            chunk = self.part(which)
            loss = fraction * self.losses.loss(chunk.inputs, chunk.logits, which)
            _add_up(total, torch.autograd.grad(loss, self.losses.weights, materialize_grads=True))
        with torch.no_grad():
            penalty = penalty_of(self.priors, self.inputs) if self.priors else 0
        return self._slope(total)[0] + penalty

    @property
    def whole(self) -> bool:
        """Whether all samples are worked on at once."""
        return self.losses.together is None

    def _chunks(self) -> list[tuple[slice, float]]:
        return pieces(len(self.inputs), self.losses.together or len(self.inputs))

    def _move(self, direction: Sequence[Tensor]) -> Tensor:
        """Move the weights along the direction, and return how far: a step of the tensor that moves most."""
        moves = torch.stack(torch._foreach_norm(list(direction))) / self.lengths
        step = self.step / moves.amax().clamp_min(torch.finfo(moves.dtype).tiny)
        for moved, weight, way in zip(self.losses.moved, self.losses.weights, direction, strict=True):
            torch.addcmul(weight.detach(), way, step, out=moved)
        return step

    def _slope(self, gradients: Gradients) -> Slope:
        """The distance, and its derivative by the gradients as a scale times a direction."""
        sent_of = self.losses.sent_of
        if sent_of is None:
            with torch.no_grad():
                return self.slope_of(gradients)
        leaves = [gradient.detach().requires_grad_() for gradient in gradients]
        sent = sent_of(leaves, self.inputs.detach(), None if self.logits is None else self.logits.detach())
        with torch.no_grad():
            value, scale, direction = self.slope_of(sent)
        return Slope(value, scale, list(slopes_along(sent, leaves, direction)))


def _add_up(total: list[Tensor], gradients: Sequence[Tensor]) -> None:
    if total:
        torch._foreach_add_(total, list(gradients))
    else:
        total.extend(gradients)


def _joined(chunks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(rows) for rows in zip(*chunks, strict=True)]
