"""A convolutional network as the chain of layers it is: what a server has to know before it chooses its parameters.

One forward pass under torch's function mode lists the calls that lead from the input to the output, so activations and
pools may be modules or functions. Networks with branches, such as residual ones, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fedprism.errors import NotApplicable
from fedprism.network.forward_pass import evaluating, same
from fedprism.network.torch_calls import TorchCall, is_marked, mark, marked, tensors_in
from fedprism.types import Update, arguments

USUAL_SIDES = (28, 32, 64, 96, 128, 224, 256)
"""Sides of images, in pixels, that are tried first to find one that the network takes: those of common data sets."""
MOST_SIDE = 300
"""In pixels: then all sides below this are tried, which bounds the search."""
IMAGE_AXES = 4
"""Axes of a batch of images: sample, channel, row, column."""


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


def stack_of(model: nn.Module, params: Update, shape: tuple[int, ...] | None = None) -> Stack:
    """The network as a chain, watched on an input of `shape`, or of a shape that fits; NotApplicable for others."""
    shape = shape or _fitting_shape(model, params)
    inputs = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(next(iter(params.values())))
    chain = _Chain(model)
    for step in _steps(model, params, inputs):
        chain.add(step)
    convolutions, dense = tuple(chain.convolutions), tuple(chain.dense)
    if not convolutions or not dense or chain.features is None:
        raise NotApplicable(
            f"{_NEEDED}, but this network has {len(convolutions)} convolutions and {len(dense)} dense layers. "
            f"{_INSTEAD}"
        )
    return Stack(convolutions=convolutions, dense=dense, shape=(shape[0], shape[1], shape[2]), features=chain.features)


_NEEDED = "mkor needs a plain chain of convolutions, activations and pools, then dense layers"
_INSTEAD = "Use class-fishing or gradient-matching for this network."


class _Step(NamedTuple):
    """A call that takes something computed from the input. `layer` is the name of the module whose weight it uses."""

    call: TorchCall
    layer: str | None
    fed: Tensor
    """What it was fed, before it ran: some calls work in place."""
    returned: Tensor
    """The same, but for a copy of the numbers."""
    outputs: Tensor


class _Recorder(TorchFunctionMode):
    """Lists every call of a torch function that takes something computed from the input and returns a tensor."""

    def __init__(self, layers: dict[int, str]) -> None:
        super().__init__()
        self.layers, self.steps = layers, list[_Step]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = TorchCall(func, args, kwargs or {})
        given = list(tensors_in((args, kwargs or {})))
        if not any(map(is_marked, given)):
            return call.run()
        fed = call.data().detach().clone()
        outputs = call.run()
        for tensor in tensors_in(outputs):
            layer = next((self.layers[id(each)] for each in given if id(each) in self.layers), None)
            self.steps.append(_Step(call, layer, fed, mark(tensor), tensor.detach().clone()))
        return outputs


def _steps(model: nn.Module, params: Update, inputs: Tensor) -> list[_Step]:
    """The calls that lead from the input to the network's output, in evaluation mode and in the order of execution."""
    tensors = {**{name: buffer.clone() for name, buffer in model.named_buffers()}, **params}
    names = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors.items()}
    with torch.no_grad(), evaluating(model), _Recorder(names) as recorder:
        args, kwargs = arguments(marked(inputs))
        wanted = functional_call(model, tensors, args, kwargs)
    chain = list[_Step]()
    for step in reversed(recorder.steps):
        if step.returned is wanted:
            chain.append(step)
            wanted = step.call.data()
            if sum(map(is_marked, tensors_in((step.call.args, step.call.kwargs)))) > 1:
                raise NotApplicable(
                    f"{_NEEDED}, but this network has branches that '{step.call.name}' joins. {_INSTEAD}"
                )
    if not chain:
        raise NotApplicable(f"{_NEEDED}, but this network does not return one tensor. {_INSTEAD}")
    return chain[::-1]


class _Chain:
    """The chain as far as it was followed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.convolutions: list[Convolution] = []
        self.dense: list[Dense] = []
        self.features: tuple[int, int, int] | None = None
        self.image: torch.Size | None = None
        """The shape of what was last known to be an image."""

    def add(self, step: _Step) -> None:
        module = None if step.layer is None else self.model.get_submodule(step.layer)
        name, outputs = step.layer or step.call.name, step.outputs
        self.image = step.fed.shape if step.fed.dim() == IMAGE_AXES else self.image
        if isinstance(module, nn.Conv2d) and not self.dense:
            _check_convolution(name, module)
            self.convolutions.append(Convolution(name=name, layer=module))
        elif isinstance(module, nn.Linear):
            self._add_dense(name, module, step)
        elif isinstance(module, nn.BatchNorm2d) and self.convolutions and not self.dense:
            self._change(norm=name)
        elif module is not None:
            raise NotApplicable(f"{_NEEDED}, but '{name}' is of type {type(module).__name__}. {_INSTEAD}")
        elif step.call.name in _POOLS:
            self._pool(_pool_of(step.call))
        elif step.call.name == "dropout" and self.dense:
            self._change(dropout=step.call.argument(1, "p"))
        elif not same(step.fed.flatten(), outputs.flatten()):  # else it only changes the shape
            self._activate(step)

    def _add_dense(self, name: str, layer: nn.Linear, step: _Step) -> None:
        if layer.bias is None:
            raise NotApplicable(f"mkor needs dense layers with biases, but '{name}' has none. {_INSTEAD}")
        if not self.dense:
            if self.image is None or math.prod(self.image[1:]) != step.fed.shape[1]:
                raise NotApplicable(f"{_NEEDED}, but '{name}' is fed with something else than images. {_INSTEAD}")
            self.features = self.image[1], self.image[2], self.image[3]
        self.dense.append(Dense(name=name, layer=layer))

    def _activate(self, step: _Step) -> None:
        activation = next((a for a, function in _ACTIVATIONS.items() if same(function(step.fed), step.outputs)), None)
        layers = self.dense or self.convolutions
        if activation is None or not layers or layers[-1].activation != "none":
            raise NotApplicable(
                f"{_NEEDED}, but '{step.call.name}' is at a place where none of these can be. {_INSTEAD}"
            )
        self._change(activation=activation)

    def _pool(self, pool: Pool) -> None:
        if self.dense or not self.convolutions:
            raise NotApplicable(
                f"{_NEEDED}, but a pool comes before the first convolution or after a dense layer. {_INSTEAD}"
            )
        self._change(pools=(*self.convolutions[-1].pools, pool))

    def _change(self, **changes: Any) -> None:
        """Change the last layer."""
        layers: list[Any] = self.dense or self.convolutions
        layers[-1] = replace(layers[-1], **changes)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid}
_POOLS = {"max_pool2d": False, "avg_pool2d": True}
"""Names of torch's functions, and whether they take means."""
_POOL_ARGUMENTS = {
    "max_pool2d": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "avg_pool2d": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
}
"""What their positional arguments after the input mean."""


def _pool_of(call: TorchCall) -> Pool:
    average, sizes = _POOLS[call.name], dict(zip(_POOL_ARGUMENTS[call.name], call.args[1:], strict=False))
    sizes |= call.kwargs
    kernel = _side(sizes["kernel_size"])
    stride = _side(sizes.get("stride") or kernel)
    padding, dilation = _side(sizes.get("padding", 0)), _side(sizes.get("dilation", 1))
    if sizes.get("ceil_mode") or dilation != 1 or (average and padding):
        raise NotApplicable(f"{_NEEDED}, but one of its pools is of another kind: {sizes}. {_INSTEAD}")
    return Pool(average, kernel, stride, padding)


def _side(size: int | tuple[int, ...]) -> int:
    sizes = {size} if isinstance(size, int) else set(size)
    if len(sizes) != 1:
        raise NotApplicable(f"mkor needs square pools, but one is of size {size}. {_INSTEAD}")
    return sizes.pop()


def _check_convolution(name: str, layer: nn.Conv2d) -> None:
    square = all(len(set(sizes)) == 1 for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    padded = isinstance(layer.padding, tuple) and len(set(layer.padding)) == 1
    if not (square and padded) or layer.groups != 1 or layer.bias is None:
        raise NotApplicable(
            f"mkor needs convolutions with square kernels, one group, plain padding and biases, but '{name}' "
            f"is {layer}. {_INSTEAD}"
        )


def _fitting_shape(model: nn.Module, params: Update) -> tuple[int, int, int]:
    """The shape of a square input that the network takes and whose features need no averaging to fit."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise NotApplicable(f"{_NEEDED}, but this network has no convolution. {_INSTEAD}")
    shadows = {name: tensor.to("meta") for name, tensor in (*model.named_buffers(), *params.items())}
    for side in dict.fromkeys((*USUAL_SIDES, *range(4, MOST_SIDE))):
        blank = torch.empty(1, first.in_channels, side, side, device="meta")
        try:
            steps = _steps(model, shadows, blank)
        except RuntimeError:
            continue
        if all(same(step.fed, step.outputs) for step in steps if step.call.name.startswith("adaptive_")):
            return first.in_channels, side, side
    raise NotApplicable(f"{_NEEDED}, but this network takes no square images of up to {MOST_SIDE} pixels. {_INSTEAD}")
