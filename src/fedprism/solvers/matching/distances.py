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
STRETCH = 2**16
"""Entries that a CPU adds up one after the other: more lose digits, and these stay in its cache for a second look."""


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
    """A distance, and its derivative by the gradients as `scale` times `direction`."""

    value: Tensor
    scale: Tensor
    direction: list[Tensor]


def slope_towards(distance: Distance, target: Gradients, *, spending: bool = False) -> Callable[[Gradients], Slope]:
    """The distance to `target` and its derivative: of the cosine in closed form, of others by autograd.

    spending: gradients are not needed any more and may be written over.
    """
    if distance is cosine and len({tensor.dtype for tensor in target}) == 1:
        return _CosineSlope(target, spending=spending)

    def slope(gradients: Gradients) -> Slope:
        with torch.enable_grad():
            leaves = [gradient.detach().requires_grad_() for gradient in gradients]
            value = distance(leaves, target)
        direction = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return Slope(value.detach(), torch.ones_like(value), list(direction))

    return slope


class _CosineSlope:
    """1 - <g, t> / |g| |t| falls along t - (<g, t> / <g, g>) g at the rate 1 / |g| |t|.

    The rate is multiplied into the result, which is as small as a batch; the gradients are as large as a network. On a
    GPU, and where they are small, all tensors are one, because each costs more to start than to do.
    """

    def __init__(self, target: Gradients, *, spending: bool) -> None:
        self.target, self.spending = _flat(target), spending
        tiny = torch.finfo(target[0].dtype).tiny
        self.length = (_products(self.target, self.target)[1] + tiny).sqrt()
        # The floor keeps the derivative finite where every entry is zero (a batch that no unit reacts to).
        self.floor = tiny

    def __call__(self, gradients: Gradients) -> Slope:
        flat = _flat(gradients)
        product, norm = _products(flat, self.target)
        norm = norm + self.floor
        scale = -1 / (norm.sqrt() * self.length)
        ratio = -product / norm
        residual = [
            torch.addcmul(t, f, ratio, out=f if self.spending else None) for t, f in zip(self.target, flat, strict=True)
        ]
        if len(residual) < len(gradients):
            residual = list(torch.split(residual[0], [gradient.numel() for gradient in gradients]))
        direction = [part.view(gradient.shape) for part, gradient in zip(residual, gradients, strict=True)]
        return Slope(1 + product * scale, scale, direction)


def _flat(tensors: Gradients) -> list[Tensor]:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return [torch.cat(flat)] if flat[0].is_cuda or sum(map(len, flat)) <= STRETCH else flat


def _products(vectors: list[Tensor], target: list[Tensor]) -> tuple[Tensor, Tensor]:
    """<vectors, target> and <vectors, vectors>."""
    across, along = list[Tensor](), list[Tensor]()
    for vector, wanted in zip(vectors, target, strict=True):
        step = max(1, len(vector)) if vector.is_cuda else STRETCH
        for a, b in zip(torch.split(vector, step), torch.split(wanted, step), strict=True):
            across.append(torch.dot(a, b))
            along.append(torch.dot(a, a))
    return _added(across), _added(along)


def _added(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()
