"""A convolutional network as the chain of layers it is: what a server has to know before it chooses its parameters.

The chain is found by watching a forward pass and comparing numbers, so that activations and pools may be modules or
functions. Networks with branches, such as residual ones, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprism.errors import NotApplicable
from fedprism.network.forward_pass import ModuleCall, same, watch
from fedprism.types import Update

USUAL_SIDES = (28, 32, 64, 96, 128, 224, 256)
"""Sides of images, in pixels, that are tried first to find one that the network takes: those of common data sets."""
MOST_SIDE = 300
"""In pixels: then all sides below this are tried, which bounds the search."""


class Pool(NamedTuple):
    """A pool of squares, without dilation and without rounding up; `average` is the mean, otherwise the maximum."""

    average: bool
    kernel: int
    stride: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution and what follows it, up to the next one. `name` is its module's."""

    name: str
    layer: nn.Conv2d
    norm: str | None = None
    activation: str = "none"
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A dense layer and what follows it: `dropout` is the probability with which its outputs are dropped."""

    name: str
    layer: nn.Linear
    activation: str = "none"
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Convolutions, then dense layers. `shape` is an input the network takes, `features` what the first dense is fed.

    features: (channels, height, width), of that input.
    """

    convolutions: tuple[Convolution, ...]
    dense: tuple[Dense, ...]
    shape: tuple[int, int, int]
    features: tuple[int, int, int]

    @property
    def classes(self) -> int:
        return self.dense[-1].layer.out_features

    @property
    def activations(self) -> frozenset[str]:
        names = [layer.activation for layer in self.convolutions]
        return frozenset([*names, *(layer.activation for layer in self.dense[:-1])])

    @property
    def averages(self) -> bool:
        """Whether its pools take means; a network without pools counts as one with maximum pools."""
        return any(pool.average for convolution in self.convolutions for pool in convolution.pools)

    @property
    def dropout(self) -> float:
        return max(layer.dropout for layer in self.dense)


class _Chain:
    """The chain as far as it was followed."""

    def __init__(self) -> None:
        self.convolutions: list[Convolution] = []
        self.dense: list[Dense] = []

    def activate(self, name: str) -> None:
        layers = self.dense or self.convolutions
        if not layers or layers[-1].activation != "none":
            raise NotApplicable(f"{_EXPECTED}, found an activation where there should be none; {_INSTEAD}")
        self._change(activation=name)

    def pool(self, pool: Pool) -> None:
        if self.dense or not self.convolutions:
            raise NotApplicable(
                f"{_EXPECTED}, found a pool before the first convolution or after a dense layer; {_INSTEAD}"
            )
        self._change(pools=(*self.convolutions[-1].pools, pool))

    def add(self, operation: ModuleCall) -> None:
        name, module = operation.name, operation.module
        step = _activation_or_pool(name, module)
        if isinstance(step, str):
            self.activate(step)
        elif isinstance(step, Pool):
            self.pool(step)
        elif isinstance(module, nn.Conv2d) and not self.dense:
            _check_convolution(name, module)
            self.convolutions.append(Convolution(name=name, layer=module))
        elif isinstance(module, nn.Linear):
            if module.bias is None:
                raise NotApplicable(f"mkor expects dense layers with biases, found none in '{name}'; {_INSTEAD}")
            self.dense.append(Dense(name=name, layer=module))
        elif isinstance(module, nn.BatchNorm2d) and self.convolutions and not self.dense:
            self._change(norm=name)
        elif isinstance(module, nn.Dropout) and self.dense:
            self._change(dropout=module.p)
        elif isinstance(module, nn.Flatten | nn.Identity) or same(operation.inputs, operation.outputs):
            pass  # an adaptive pool that has nothing to do, for instance
        else:
            raise NotApplicable(f"{_EXPECTED}, found '{name}', a {type(module).__name__}; {_INSTEAD}")

    def _change(self, **changes: Any) -> None:
        """Change the last layer."""
        layers: list[Any] = self.dense or self.convolutions
        layers[-1] = replace(layers[-1], **changes)


def stack_of(model: nn.Module, params: Update, shape: tuple[int, ...] | None = None) -> Stack:
    """The network as a chain, watched on an input of `shape`, or of a shape that fits; NotApplicable for others."""
    shape = shape or _fitting_shape(model, params)
    inputs = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(next(iter(params.values())))
    operations, outputs = watch(model, params, inputs, _innermost(model))
    if not operations or not same(operations[-1].outputs, outputs):
        raise NotApplicable(f"{_EXPECTED}, found other operations at its end; {_INSTEAD}")
    chain, features = _Chain(), None
    last = image = inputs
    for operation in operations:
        activation, pool, fed = _between(last, operation)
        if activation != "none":
            chain.activate(activation)
        if pool is not None:
            chain.pool(pool)
        image = fed if fed.dim() == 4 else image
        if isinstance(operation.module, nn.Linear) and not chain.dense:
            features = _unflattened(image, operation)
        chain.add(operation)
        last = operation.outputs
        image = last if last.dim() == 4 else image
    convolutions, dense = tuple(chain.convolutions), tuple(chain.dense)
    if not convolutions or not dense or features is None:
        raise NotApplicable(f"{_EXPECTED}, found {len(convolutions)} and {len(dense)} of these; {_INSTEAD}")
    return Stack(convolutions=convolutions, dense=dense, shape=(shape[0], shape[1], shape[2]), features=features)


_EXPECTED = "mkor expects a plain chain of convolutions, activations and pools, then dense layers"
_INSTEAD = "use class-fishing or gradient-matching for this network."

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
_POOLS: dict[Pool | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    Pool(False, 2, 2, 0): lambda x: F.max_pool2d(x, 2),
    Pool(False, 3, 2, 0): lambda x: F.max_pool2d(x, 3, 2),
    Pool(True, 2, 2, 0): lambda x: F.avg_pool2d(x, 2),
}


def _between(last: Tensor, operation: ModuleCall) -> tuple[str, Pool | None, Tensor]:
    """The activation and the pool between one layer's outputs and the next one's inputs, and these unflattened."""
    for name, activate in _ACTIVATIONS.items():
        for pool, reduce in _POOLS.items() if last.dim() == 4 else ((None, _POOLS[None]),):
            if pool is not None and min(last.shape[2:]) < pool.kernel:
                continue
            fed = reduce(activate(last))
            if same(fed, operation.inputs) or same(fed.flatten(1), operation.inputs):
                return name, pool, fed
    raise NotApplicable(f"{_EXPECTED}, found something else before '{operation.name}'; {_INSTEAD}")


def _unflattened(image: Tensor, operation: ModuleCall) -> tuple[int, int, int]:
    """The shape of the features that the first dense layer is fed, (channels, height, width)."""
    shape = image.shape[1:]
    if math.prod(shape) != operation.inputs.shape[1]:
        raise NotApplicable(f"{_EXPECTED}, found '{operation.name}' fed with something else than images; {_INSTEAD}")
    return shape[0], shape[1], shape[2]


def _activation_or_pool(name: str, module: nn.Module) -> str | Pool | None:
    if isinstance(module, nn.ReLU | nn.Sigmoid):
        return "relu" if isinstance(module, nn.ReLU) else "sigmoid"
    if isinstance(module, nn.MaxPool2d) and not module.ceil_mode and module.dilation == 1:
        return Pool(False, *_squares(name, module))
    if isinstance(module, nn.AvgPool2d) and not module.ceil_mode and not module.padding:
        return Pool(True, *_squares(name, module))
    return None


def _check_convolution(name: str, layer: nn.Conv2d) -> None:
    square = all(len(set(sizes)) == 1 for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    padded = isinstance(layer.padding, tuple) and len(set(layer.padding)) == 1
    if not (square and padded) or layer.groups != 1 or layer.bias is None:
        raise NotApplicable(
            f"mkor expects convolutions with square kernels, one group, plain padding and biases, found '{name}' "
            f"({layer}); {_INSTEAD}"
        )


def _squares(name: str, module: nn.MaxPool2d | nn.AvgPool2d) -> tuple[int, int, int]:
    sizes = (module.kernel_size, module.stride, module.padding)
    if not all(isinstance(size, int) or len(set(size)) == 1 for size in sizes):
        raise NotApplicable(f"mkor expects square pools, found '{name}' ({module}); {_INSTEAD}")
    kernel, stride, padding = (size if isinstance(size, int) else size[0] for size in sizes)
    return int(kernel), int(stride), int(padding)


def _fitting_shape(model: nn.Module, params: Update) -> tuple[int, int, int]:
    """The shape of a square input that the network takes and whose features need no averaging to fit."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise NotApplicable(f"{_EXPECTED}, found no convolution; {_INSTEAD}")
    shadows = {name: tensor.to("meta") for name, tensor in (*params.items(), *model.named_buffers())}
    for side in dict.fromkeys((*USUAL_SIDES, *range(4, MOST_SIDE))):
        blank = torch.empty(1, first.in_channels, side, side, device="meta")
        try:
            operations, _ = watch(model, shadows, blank, _innermost(model))
        except RuntimeError:
            continue
        adaptive = [o for o in operations if isinstance(o.module, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d)]
        if all(operation.inputs.shape == operation.outputs.shape for operation in adaptive):
            return first.in_channels, side, side
    raise NotApplicable(f"{_EXPECTED}, found none that takes square images of up to {MOST_SIDE} pixels; {_INSTEAD}")


def _innermost(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not any(module.children())]
