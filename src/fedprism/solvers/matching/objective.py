"""The objective of gradient matching: the distance of the guess's gradients from those observed, and priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.solvers.matching.distances import Gradients, Slope

Prior: TypeAlias = Callable[[Tensor], Tensor]


class Parts(NamedTuple):
    """How to work on `together` samples at a time, where the batch's gradients are the mean of the samples'.

    gradients_of(inputs, label_logits, which) are those of the samples `which` alone.
    """

    gradients_of: Callable[[Tensor, Tensor | None, slice], Gradients]
    together: int


@dataclass(frozen=True)
class Variables:
    """Inputs and, where labels are not known, their logits."""

    inputs: Tensor
    logits: Tensor | None

    @property
    def variables(self) -> list[Tensor]:
        return [self.inputs] if self.logits is None else [self.inputs, self.logits]

    def part(self, which: slice) -> Variables:
        """The variables of some samples, as new leaves."""
        inputs, *logits = (variable[which].detach().requires_grad_() for variable in self.variables)
        return Variables(inputs, logits[0] if logits else None)


@dataclass(frozen=True)
class Objective(Variables):
    """Distance plus priors at the variables as they are, and the derivative by each of them.

    gradients_of must be differentiable by the variables. With `parts` a pass more keeps the memory to that of one part:
    first the gradients of all are added up, then each part is computed again and differentiated along the slope.
    """

    gradients_of: Callable[[Tensor, Tensor | None], Gradients]
    slope_of: Callable[[Gradients], Slope]
    priors: tuple[Prior, ...] = ()
    parts: Parts | None = None

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        if self.parts is not None:
            return self._by_parts(self.parts)
        gradients = self.gradients_of(self.inputs, self.logits)
        with torch.no_grad():
            value, scale, direction = self.slope_of(gradients)
        outputs = list(gradients)
        if self.priors:
            penalty = penalty_of(self.priors, self.inputs)
            value = value + penalty.detach()
            # One pass back for all: the scale that its result is multiplied by is divided out of the priors.
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
            value, scale, direction = self.slope_of(gradients)
        del gradients  # as large as the network
        by_part = list[list[Tensor]]()
        for which, fraction in pieces(len(self.inputs), parts.together):
            variables, outputs = self._of(parts, which)
            by_part.append([fraction * scale * slope for slope in slopes_along(outputs, variables, direction)])
        slopes = [torch.cat(rows) for rows in zip(*by_part, strict=True)]
        if self.priors:
            value = value + penalised(penalty_of(self.priors, self.inputs), self.inputs, slopes)
        return value, slopes

    def _gradients(self, parts: Parts) -> list[Tensor]:
        """The gradients of the whole batch, added up part by part."""
        total = list[Tensor]()
        for which, fraction in pieces(len(self.inputs), parts.together):
            gradients = [gradient.detach() for gradient in self._of(parts, which)[1]]
            total = total or [torch.zeros_like(gradient) for gradient in gradients]
            torch._foreach_add_(total, gradients, alpha=fraction)
        return total

    def _of(self, parts: Parts, which: slice) -> tuple[list[Tensor], Gradients]:
        """The variables of some samples, and their gradients."""
        chunk = self.part(which)
        return chunk.variables, parts.gradients_of(chunk.inputs, chunk.logits, which)


def pieces(size: int, together: int) -> list[tuple[slice, float]]:
    """Slices of up to `together` samples, each with its fraction of the batch."""
    ends = [(first, min(first + together, size)) for first in range(0, size, together)]
    return [(slice(first, end), (end - first) / size) for first, end in ends]


def penalty_of(priors: Sequence[Prior], inputs: Tensor) -> Tensor:
    return torch.stack([prior(inputs) for prior in priors]).sum()


def penalised(penalty: Tensor, inputs: Tensor, slopes: list[Tensor]) -> Tensor:
    """Add the penalty's derivative to the first of the slopes, that by the inputs, and return its value."""
    if penalty.requires_grad:  # a prior may say nothing about these inputs
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
