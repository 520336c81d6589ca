"""How far the gradients of a guess are from those observed, and the way in which that falls.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (squared distance);
Geiping, Bauermeister, Dröge, Moeller, "Inverting Gradients", NeurIPS 2020 (cosine distance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.runtime.factors import Factors

Gradients: TypeAlias = Sequence[Tensor]
Sent: TypeAlias = Sequence[Tensor | Factors]
"""Gradients, of which those of large weights may be kept as factors."""
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
    """A distance, and its derivative as `scale` times that of `outputs` along `direction`."""

    value: Tensor
    scale: Tensor
    outputs: list[Tensor]
    """The gradients; of those kept as factors, their products with the target and their squares."""
    direction: list[Tensor]


def slope_towards(distance: Distance, target: Gradients, *, spending: bool = False) -> Callable[[Sent], Slope]:
    """The distance to `target` and its derivative: of the cosine in closed form, of others by autograd.

    spending: gradients are not needed any more and may be written over.
    """
    if distance is cosine and len({tensor.dtype for tensor in target}) == 1:
        return _CosineSlope(target, spending=spending)

    def slope(sent: Sent) -> Slope:
        with torch.enable_grad():
            gradients = [g.written(t) if isinstance(g, Factors) else g for g, t in zip(sent, target, strict=True)]
            leaves = [gradient.detach().requires_grad_() for gradient in gradients]
            value = distance(leaves, target)
        return Slope(
            value.detach(),
            torch.ones_like(value),
            gradients,
            list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)),
        )

    return slope


class _CosineSlope:
    """1 - <g, t> / |g| |t| falls along t - (<g, t> / <g, g>) g at the rate 1 / |g| |t|.

    The rate is multiplied into the result, which is as small as a batch; the gradients are as large as a network. On a
    GPU, and where they are small, all tensors are one, because each costs more to start than to do.
    """

    def __init__(self, target: Gradients, *, spending: bool) -> None:
        self.target, self.flat, self.spending = target, _flat(target), spending
        tiny = torch.finfo(target[0].dtype).tiny
        self.length = (_products(self.flat, self.flat)[1] + tiny).sqrt()
        # The floor keeps the derivative finite where every entry is zero (a batch that no unit reacts to).
        self.floor = tiny

    def __call__(self, sent: Sent) -> Slope:
        pairs = list(zip(sent, self.target, strict=True))
        written = [gradient for gradient in sent if isinstance(gradient, Tensor)]
        with torch.enable_grad():
            asked = [ask for g, t in pairs if isinstance(g, Factors) for ask in (g.along(t), g.square())]
        flat = _flat(written)
        target = _flat([t for g, t in pairs if isinstance(g, Tensor)]) if asked else self.flat
        product, norm = _products(flat, target)
        product, norm = (sum(part.detach() for part in asked[k::2]) + total for k, total in enumerate((product, norm)))
        norm = norm + self.floor
        scale = -1 / (norm.sqrt() * self.length)
        ratio = -product / norm
        residual = [
            torch.addcmul(t, f, ratio, out=f if self.spending else None) for t, f in zip(target, flat, strict=True)
        ]
        if len(residual) < len(written):
            residual = list(torch.split(residual[0], [gradient.numel() for gradient in written]))
        direction = [part.view(gradient.shape) for part, gradient in zip(residual, written, strict=True)]
        # Of a gradient that is kept as factors: by its product with the target, and by its square, which counts twice.
        ways = [torch.ones_like(ratio), ratio / 2] * (len(asked) // 2)
        return Slope(1 + product * scale, scale, [*written, *asked], [*direction, *ways])


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
