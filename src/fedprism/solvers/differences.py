"""Matching gradients without differentiating them: the slope as a difference of two gradients by the inputs.

How the gradient by the weights changes with the inputs, asked along a direction v, is how the gradient by the inputs
changes with the weights along v: both are the same mixed derivative of the loss. So it is the difference of two
ordinary gradients by the inputs, at the weights and a small step along v from them. The first comes along with the
gradient by the weights. Counted in passes through the network that is five (forward, back by inputs and by weights;
forward, back by inputs) where differentiating twice takes seven, and none of them is recorded to be differentiated
again, which is what the rest of the time and most of the memory go into.

The network has to be smooth between the two, so its kinks are held (`kinks`). In float32 the slope is some tenths of
a percent off, and of its signs one in some hundred, those that hardly count: enough to step along them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .distances import Gradients, Slope
from .kinks import Kinks, unheld
from .objective import Prior, Variables, penalised, penalty_of, pieces, slopes_along

STEP = 1e-3
"""How far the weights move, as a share of the length of the tensor that moves most: less is lost in rounding."""
ROUGH_STEP = 1e-2
"""The same where products are rounded to TF32: with less, what is found gets worse."""
SMALLEST = 1e-2
"""The least that the entries of a tensor are taken to be on average: biases may all be zero."""

Loss = Callable[[Tensor, Tensor | None, slice], Tensor]


ALL = slice(None)


class TwoLosses(NamedTuple):
    """A client's loss of (inputs, label_logits, which samples these are), and that with `moved` in place of `weights`.

    sent_of(gradients by the weights, inputs, label_logits) is what is sent of them, differentiable by the gradients;
    None: they themselves. kinked: whether there are kinks to be held, which `looked_at` tells. together: so many
    samples are worked on at a time, which a loss that is their mean and a sent_of of None allow; None: all.
    """

    loss: Loss
    moved_loss: Loss
    weights: Sequence[Tensor]
    moved: Sequence[Tensor]
    sent_of: Callable[[Gradients, Tensor, Tensor | None], Gradients] | None = None
    kinked: bool = True
    together: int | None = None


class Held(NamedTuple):
    """Whether a difference may be taken: `refusal` says why not; `kinks` whether there are any to be held."""

    refusal: str
    kinks: bool


def looked_at(losses: TwoLosses, inputs: Tensor, logits: Tensor | None) -> Held:
    """What a pass through both losses shows."""
    kinks = Kinks()
    with kinks.keeping():
        losses.loss(inputs, logits, ALL)
    kinked = bool(kinks.kept)
    with kinks.repeating():
        repeated = losses.moved_loss(inputs.detach().requires_grad_(), logits, ALL)
    found = "the network compares or draws" if kinks.chooses else unheld(repeated)
    return Held(found, kinked)


@dataclass(frozen=True)
class Differenced(Variables):
    """What `Objective` is, from two losses."""

    losses: TwoLosses
    slope_of: Callable[[Gradients], Slope]
    priors: tuple[Prior, ...] = ()
    step: float = STEP
    kinks: Kinks = field(default_factory=Kinks, init=False)

    @cached_property
    def lengths(self) -> Tensor:
        """Of the weights."""
        return _lengths(self.losses.weights)

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        return self._whole() if self.losses.together is None else self._by_parts(self.losses.together)

    def value(self) -> Tensor:
        """Without the derivative, at about half the cost."""
        total = list[Tensor]()
        for which, share in pieces(len(self.inputs), self.losses.together or len(self.inputs)):
            own = self.part(which)
            loss = share * self.losses.loss(own.inputs, own.logits, which)
            _add_up(total, torch.autograd.grad(loss, self.losses.weights, materialize_grads=True))
        with torch.no_grad():
            penalty = penalty_of(self.priors, self.inputs) if self.priors else 0
        return self._slope(total)[0] + penalty

    def _whole(self) -> tuple[Tensor, list[Tensor]]:
        losses, variables = self.losses, self.variables
        with self._keeping():
            loss = losses.loss(self.inputs, self.logits, ALL)
        penalty = penalty_of(self.priors, self.inputs) if self.priors else None
        found = torch.autograd.grad(
            loss, [*variables, *losses.weights], retain_graph=penalty is not None, materialize_grads=True
        )
        before, gradients = found[: len(variables)], found[len(variables) :]
        value, scale, direction = self._slope(gradients)
        step = self._move(direction)
        with self._repeating():
            moved_loss = losses.moved_loss(self.inputs, self.logits, ALL)
        after = torch.autograd.grad(moved_loss, variables)
        slopes = [(there - here) * (scale / step) for here, there in zip(before, after, strict=True)]
        if penalty is not None:
            value = value + penalised(penalty, self.inputs, slopes)
        return value, slopes

    def _by_parts(self, together: int) -> tuple[Tensor, list[Tensor]]:
        """The same in the memory of some samples: which side their units are on is looked at twice."""
        losses, parts = self.losses, pieces(len(self.inputs), together)
        total, before, after = list[Tensor](), list[Sequence[Tensor]](), list[Sequence[Tensor]]()
        for which, share in parts:
            own = self.part(which)
            loss = share * losses.loss(own.inputs, own.logits, which)
            found = torch.autograd.grad(loss, [*own.variables, *losses.weights], materialize_grads=True)
            before.append(found[: len(own.variables)])
            _add_up(total, found[len(own.variables) :])
        value, scale, direction = self._slope(total)
        step = self._move(direction)
        for which, share in parts:
            own = self.part(which)
            if losses.kinked:
                with torch.no_grad(), self._keeping():
                    losses.loss(own.inputs, own.logits, which)
            with self._repeating():
                moved_loss = share * losses.moved_loss(own.inputs, own.logits, which)
            after.append(torch.autograd.grad(moved_loss, own.variables))
        here, there = ([torch.cat(each) for each in zip(*slopes, strict=True)] for slopes in (before, after))
        slopes = [(b - a) * (scale / step) for a, b in zip(here, there, strict=True)]
        if self.priors:
            value = value + penalised(penalty_of(self.priors, self.inputs), self.inputs, slopes)
        return value, slopes

    def _keeping(self) -> AbstractContextManager[None]:
        return self.kinks.keeping() if self.losses.kinked else nullcontext()

    def _repeating(self) -> AbstractContextManager[None]:
        return self.kinks.repeating() if self.losses.kinked else nullcontext()

    def _move(self, direction: Sequence[Tensor]) -> Tensor:
        """Put the moved weights where they belong, and say how far along the direction."""
        step = self.step / _largest_share(direction, self.lengths)
        for moved, weight, way in zip(self.losses.moved, self.losses.weights, direction, strict=True):
            torch.addcmul(weight.detach(), way, step, out=moved)
        return step

    def _slope(self, gradients: Gradients) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The distance, and its derivative by the gradients as a scale times a direction."""
        sent_of = self.losses.sent_of
        if sent_of is None:
            with torch.no_grad():
                value, scale, _, direction = self.slope_of(gradients)
            return value, scale, direction
        leaves = [gradient.detach().requires_grad_() for gradient in gradients]
        sent = sent_of(leaves, self.inputs.detach(), None if self.logits is None else self.logits.detach())
        with torch.no_grad():
            value, scale, outputs, direction = self.slope_of(sent)
        return value, scale, list(slopes_along(outputs, leaves, direction))


def _add_up(total: list[Tensor], found: Sequence[Tensor]) -> None:
    if total:
        torch._foreach_add_(total, list(found))
    else:
        total.extend(found)


def _lengths(weights: Sequence[Tensor]) -> Tensor:
    floors = [SMALLEST * weight.numel() ** 0.5 for weight in weights]
    lengths = torch.stack(torch._foreach_norm([weight.detach() for weight in weights]))
    return torch.maximum(lengths, lengths.new_tensor(floors))


def _largest_share(direction: Sequence[Tensor], lengths: Tensor) -> Tensor:
    """How far one step along the direction moves the tensor that it moves most, as a share of that tensor's length."""
    shares = torch.stack(torch._foreach_norm(list(direction))) / lengths
    return shares.amax().clamp_min(torch.finfo(shares.dtype).tiny)
