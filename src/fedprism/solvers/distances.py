"""How far the gradients of a guess are from those observed, and the way in which that falls.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (squared distance);
Geiping, Bauermeister, Dröge, Moeller, "Inverting Gradients", NeurIPS 2020 (cosine distance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = Sequence[Tensor]
Distance: TypeAlias = Callable[[Gradients, Gradients], Tensor]


def squared_error(gradients: Gradients, target: Gradients) -> Tensor:
    """Sum of squared differences over all entries."""
    return torch.stack([(g - t).square().sum() for g, t in zip(gradients, target, strict=True)]).sum()


def cosine(gradients: Gradients, target: Gradients) -> Tensor:
    """One minus the cosine of the angle between the two, all tensors taken as one long vector."""
    product = torch.stack([(g * t).sum() for g, t in zip(gradients, target, strict=True)]).sum()
    norm = torch.stack([g.square().sum() for g in gradients]).sum()
    target_norm = torch.stack([t.square().sum() for t in target]).sum()
    # The floor keeps the derivative finite where every entry is zero (a batch that no unit reacts to).
    tiny = torch.finfo(norm.dtype).tiny
    return 1 - product / ((norm + tiny).sqrt() * (target_norm + tiny).sqrt())


class Slope(NamedTuple):
    """A distance and its derivative by the gradients, which is `scale` times `direction`."""

    value: Tensor
    scale: Tensor
    direction: list[Tensor]


def slope_towards(distance: Distance, target: Gradients) -> Callable[[Gradients], Slope]:
    """The distance to `target` and its derivative: of the cosine in closed form, of others by autograd."""
    if distance is cosine and len({tensor.dtype for tensor in target}) == 1:
        return _CosineSlope(target)

    def slope(gradients: Gradients) -> Slope:
        leaves = [gradient.detach().requires_grad_() for gradient in gradients]
        with torch.enable_grad():
            value = distance(leaves, target)
        return Slope(
            value.detach(),
            torch.ones_like(value),
            list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)),
        )

    return slope


class _CosineSlope:
    """1 - <g, t> / |g| |t| falls along t - (<g, t> / <g, g>) g, what g leaves of t, at the rate 1 / |g| |t|.

    The derivative is handed on without the rate, which is multiplied into the result: that is as small as a batch, and
    the gradients as large as a network. On a GPU all tensors are one, because each costs more to start than to do.
    """

    def __init__(self, target: Gradients) -> None:
        self.shapes = [tensor.shape for tensor in target]
        self.target = self._flat(target)
        tiny = torch.finfo(target[0].dtype).tiny
        self.length = (self._product(self.target, self.target) + tiny).sqrt()
        # The floor keeps the derivative finite where every entry is zero (a batch that no unit reacts to).
        self.floor = tiny

    def __call__(self, gradients: Gradients) -> Slope:
        flat = self._flat(gradients)
        product, norm = self._product(flat, self.target), self._product(flat, flat) + self.floor
        scale = -1 / (norm.sqrt() * self.length)
        share = -product / norm
        left = [torch.addcmul(wanted, found, share) for wanted, found in zip(self.target, flat, strict=True)]
        if len(left) < len(self.shapes):
            left = list(torch.split(left[0], [shape.numel() for shape in self.shapes]))
        direction = [part.view(shape) for part, shape in zip(left, self.shapes, strict=True)]
        return Slope(1 + product * scale, scale, direction)

    @staticmethod
    def _flat(tensors: Gradients) -> list[Tensor]:
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        return [torch.cat(flat)] if flat[0].is_cuda else flat

    @staticmethod
    def _product(first: list[Tensor], second: list[Tensor]) -> Tensor:
        return torch.stack([_dot(a, b) for a, b in zip(first, second, strict=True)]).sum()


def _dot(first: Tensor, second: Tensor) -> Tensor:
    # On a CPU `dot` adds up one after the other, which loses digits in long vectors; `sum` adds up pairs.
    return torch.dot(first, second) if first.is_cuda or len(first) <= 2**16 else (first * second).sum()
