"""A convolutional network as the chain of layers it is: what a server has to know before it chooses its parameters.

The chain is found by watching a forward pass and comparing numbers, so that activations and pools may be modules or
functions. Networks with branches, such as residual ones, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain as joined
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.errors import NotApplicable
from fedprism.types import Update

USUAL_SIDES = (28, 32, 64, 96, 128, 224, 256)
MOST_SIDE = 300
"""Sides of images that are tried, to find one that the network takes: the usual ones first, then all up to this."""


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


Layer = TypeVar("Layer", Convolution, Dense)


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


class _Seen(NamedTuple):
    name: str
    module: nn.Module
    inputs: Tensor
    outputs: Tensor


def stack_of(model: nn.Module, params: Update, shape: tuple[int, ...] | None = None) -> Stack:
    """The network as a chain, watched on an input of `shape`, or of a shape that fits; NotApplicable for others."""
    place = next(iter(params.values()))
    shape = shape or _fitting_shape(model, params)
    inputs = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(place)
    seen, outputs = _watch(model, dict(params), inputs)
    if not seen or not _same(seen[-1].outputs, outputs):
        raise NotApplicable(f"{_EXPECTED}, found other operations at its end; {_INSTEAD}")
    convolutions, dense, features = list[Convolution](), list[Dense](), None
    last = image = inputs
    for layer in seen:
        steps, fed = _between(last, layer)
        for step in steps:
            _extend(convolutions, dense, step)
        image = fed if fed.dim() == 4 else image
        if isinstance(layer.module, nn.Linear) and not dense:
            features = _unflattened(image, layer)
        _extend(convolutions, dense, layer)
        last = layer.outputs
        image = last if last.dim() == 4 else image
    if not convolutions or not dense or features is None:
        raise NotApplicable(f"{_EXPECTED}, found {len(convolutions)} and {len(dense)} of these; {_INSTEAD}")
    return Stack(
        convolutions=tuple(convolutions), dense=tuple(dense), shape=(shape[0], shape[1], shape[2]), features=features
    )


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


def _between(last: Tensor, layer: _Seen) -> tuple[list[str | Pool], Tensor]:
    """What functions did between one layer's outputs and the next one's inputs, and these before any flattening."""
    images = last.dim() == 4
    for name, activate in _ACTIVATIONS.items():
        for pool, reduce in _POOLS.items() if images else ((None, _POOLS[None]),):
            if pool is not None and min(last.shape[2:]) < pool.kernel:
                continue
            tried = reduce(activate(last))
            if _same(tried, layer.inputs) or _same(tried.flatten(1), layer.inputs):
                return [*([name] if name != "none" else []), *([pool] if pool is not None else [])], tried
    raise NotApplicable(f"{_EXPECTED}, found something else before '{layer.name}'; {_INSTEAD}")


def _unflattened(image: Tensor, layer: _Seen) -> tuple[int, int, int]:
    """The shape of the features that the first dense layer is fed, (channels, height, width)."""
    shape = image.shape[1:]
    if math.prod(shape) != layer.inputs.shape[1]:
        raise NotApplicable(f"{_EXPECTED}, found '{layer.name}' fed with something else than images; {_INSTEAD}")
    return shape[0], shape[1], shape[2]


def _extend(convolutions: list[Convolution], dense: list[Dense], step: _Seen | str | Pool) -> None:
    """Put one more operation at the end of the chain."""
    if isinstance(step, str):
        _activate(convolutions, dense, step)
    elif isinstance(step, Pool):
        _pool(convolutions, dense, step)
    else:
        _add(convolutions, dense, step)


def _add(convolutions: list[Convolution], dense: list[Dense], seen: _Seen) -> None:
    module = seen.module
    if isinstance(module, nn.Conv2d) and not dense:
        _check_convolution(seen.name, module)
        convolutions.append(Convolution(name=seen.name, layer=module))
    elif isinstance(module, nn.Linear):
        if module.bias is None:
            raise NotApplicable(f"mkor expects dense layers with biases, found none in '{seen.name}'; {_INSTEAD}")
        dense.append(Dense(name=seen.name, layer=module))
    elif isinstance(module, nn.BatchNorm2d) and convolutions and not dense:
        _replace_last(convolutions, norm=seen.name)
    elif isinstance(module, nn.ReLU):
        _activate(convolutions, dense, "relu")
    elif isinstance(module, nn.Sigmoid):
        _activate(convolutions, dense, "sigmoid")
    elif isinstance(module, nn.MaxPool2d) and not module.ceil_mode and module.dilation == 1:
        _pool(convolutions, dense, Pool(False, *_squares(seen.name, module)))
    elif isinstance(module, nn.AvgPool2d) and not module.ceil_mode and not module.padding:
        _pool(convolutions, dense, Pool(True, *_squares(seen.name, module)))
    elif isinstance(module, nn.Dropout) and dense:
        _replace_last(dense, dropout=module.p)
    elif isinstance(module, nn.Flatten | nn.Identity) or _same(seen.inputs, seen.outputs):
        pass  # an adaptive pool that has nothing to do, for instance
    else:
        raise NotApplicable(f"{_EXPECTED}, found '{seen.name}', a {type(module).__name__}; {_INSTEAD}")


def _activate(convolutions: list[Convolution], dense: list[Dense], name: str) -> None:
    last = (dense or convolutions)[-1:]
    if not last or last[0].activation != "none":
        raise NotApplicable(f"{_EXPECTED}, found an activation where there should be none; {_INSTEAD}")
    if dense:
        _replace_last(dense, activation=name)
    else:
        _replace_last(convolutions, activation=name)


def _pool(convolutions: list[Convolution], dense: list[Dense], pool: Pool) -> None:
    if dense or not convolutions:
        raise NotApplicable(
            f"{_EXPECTED}, found a pool before the first convolution or after a dense layer; {_INSTEAD}"
        )
    _replace_last(convolutions, pools=(*convolutions[-1].pools, pool))


def _replace_last(layers: list[Layer], **changes: Any) -> None:
    layers[-1] = replace(layers[-1], **changes)


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
    shadows = {name: p.to("meta") for name, p in joined(params.items(), model.named_buffers())}
    for side in dict.fromkeys((*USUAL_SIDES, *range(4, MOST_SIDE))):
        try:
            seen, _ = _watch(model, shadows, torch.empty(1, first.in_channels, side, side, device="meta"))
        except RuntimeError:
            continue
        adapted = [s for s in seen if isinstance(s.module, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d)]
        if all(s.inputs.shape == s.outputs.shape for s in adapted):
            return first.in_channels, side, side
    raise NotApplicable(f"{_EXPECTED}, found none that takes square images of up to {MOST_SIDE} pixels; {_INSTEAD}")


def _watch(model: nn.Module, tensors: Update, inputs: Tensor) -> tuple[list[_Seen], Tensor]:
    """What every innermost module was fed and put out, in the order of execution, in evaluation mode."""
    seen: list[_Seen] = []
    names = {module: name for name, module in model.named_modules()}

    def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # Copies, because an activation may work in place.
        seen.append(_Seen(names[module], module, args[0].detach().clone(), args[0]))

    def answered(module: nn.Module, _: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen[-1] = seen[-1]._replace(outputs=outputs.detach().clone())

    leaves = [module for module in model.modules() if not any(module.children())]
    hooks = [leaf.register_forward_pre_hook(remember) for leaf in leaves]
    hooks += [leaf.register_forward_hook(answered) for leaf in leaves]
    try:
        with torch.no_grad(), _evaluating(model):
            outputs = functional_call(model, dict(tensors), (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    return seen, outputs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and (first.is_meta or torch.equal(first, second))
