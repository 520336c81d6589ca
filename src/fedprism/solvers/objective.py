"""What gradient matching minimises: the distance of the guess's gradients from those observed, and its priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .distances import Gradients, Sent, Slope

Prior: TypeAlias = Callable[[Tensor], Tensor]


class Parts(NamedTuple):
    """Samples of a batch a few at a time, where the gradients of the batch are the mean of theirs.

    gradients_of(inputs, label_logits, which) are those of `which` alone.
    """

    gradients_of: Callable[[Tensor, Tensor | None, slice], Gradients]
    together: int


@dataclass(frozen=True)
class Variables:
    """What is looked for: inputs and, where they are not known, the logits of labels."""

    inputs: Tensor
    logits: Tensor | None

    @property
    def variables(self) -> list[Tensor]:
        return [self.inputs] if self.logits is None else [self.inputs, self.logits]

    def part(self, which: slice) -> Variables:
        """Those of some samples, apart from the others."""
        inputs, *logits = (variable[which].detach().requires_grad_() for variable in self.variables)
        return Variables(inputs, logits[0] if logits else None)


@dataclass(frozen=True)
class Objective(Variables):
    """Distance plus priors at the variables as they are, and the derivative by each of them.

    gradients_of must be differentiable by the inputs and, where there are any, the logits of the labels. With `parts`
    the memory is that of one of them, for a further pass: first the gradients of all are added up, then, the slope of
    the distance being known, each part is asked again and differentiated along it.
    """

    gradients_of: Callable[[Tensor, Tensor | None], Sent]
    slope_of: Callable[[Sent], Slope]
    priors: tuple[Prior, ...] = ()
    parts: Parts | None = None

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        if self.parts is not None:
            return self._by_parts(self.parts)
        gradients = self.gradients_of(self.inputs, self.logits)
        with torch.no_grad():
            value, scale, outputs, direction = self.slope_of(gradients)
        if self.priors:
            penalty = penalty_of(self.priors, self.inputs)
            value = value + penalty.detach()
            # One pass back for all: the scale that its result is multiplied by is divided out of the priors' share.
            outputs, direction = [*outputs, penalty], [*direction, 1 / scale]
        return value, [scale * slope for slope in slopes_along(outputs, self.variables, direction)]

    def value(self) -> Tensor:
        """Without the derivative, at less than half the cost."""
        gradients = self._gradients(self.parts) if self.parts else self.gradients_of(self.inputs, self.logits)
        with torch.no_grad():
            value = self.slope_of(gradients).value
            return value + penalty_of(self.priors, self.inputs) if self.priors else value

    def _by_parts(self, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        gradients = self._gradients(parts)
        with torch.no_grad():
            value, scale, _, direction = self.slope_of(gradients)
        del gradients
        found = list[list[Tensor]]()
        for which, share in pieces(len(self.inputs), parts.together):
            variables, own = self._of(parts, which)
            found.append([share * scale * slope for slope in slopes_along(own, variables, direction)])
        slopes = [torch.cat(own) for own in zip(*found, strict=True)]
        if self.priors:
            value = value + penalised(penalty_of(self.priors, self.inputs), self.inputs, slopes)
        return value, slopes

    def _gradients(self, parts: Parts) -> list[Tensor]:
        """Those of the whole batch, added up part by part."""
        total = list[Tensor]()
        for which, share in pieces(len(self.inputs), parts.together):
            own = [gradient.detach() for gradient in self._of(parts, which)[1]]
            total = total or [torch.zeros_like(gradient) for gradient in own]
            torch._foreach_add_(total, own, alpha=share)
        return total

    def _of(self, parts: Parts, which: slice) -> tuple[list[Tensor], Gradients]:
        """One part of the variables, and its gradients, differentiable by it."""
        own = self.part(which)
        return own.variables, parts.gradients_of(own.inputs, own.logits, which)


def pieces(size: int, together: int) -> list[tuple[slice, float]]:
    """Which samples of a batch are worked on at a time, and their share of it."""
    ends = [(first, min(first + together, size)) for first in range(0, size, together)]
    return [(slice(first, end), (end - first) / size) for first, end in ends]


def penalty_of(priors: Sequence[Prior], inputs: Tensor) -> Tensor:
    return torch.stack([prior(inputs) for prior in priors]).sum()


def penalised(penalty: Tensor, inputs: Tensor, slopes: list[Tensor]) -> Tensor:
    """What the penalty adds to the value; its derivative is added to the first of the slopes, that by the inputs."""
    slopes[0] = slopes[0] + torch.autograd.grad(penalty, inputs)[0]
    return penalty.detach()


def slopes_along(
    outputs: Sequence[Tensor], variables: Sequence[Tensor], direction: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The derivative of the outputs, along the direction, by each variable."""
    # Gradients that no input changes (a bias under some losses) have nothing to say.
    moving = [(output, way) for output, way in zip(outputs, direction, strict=True) if output.requires_grad]
    if not moving:
        return [torch.zeros_like(variable) for variable in variables]
    moved, ways = map(list, zip(*moving, strict=True))
    return torch.autograd.grad(moved, variables, ways, allow_unused=True, materialize_grads=True)
