"""What the dense layers and convolutions of a network are fed, as a differentiable function of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad, unfold
from torch.overrides import TorchFunctionMode

from fedprism.network.operations import Operation
from fedprism.network.torch_calls import Kind, TorchCall
from fedprism.types import Update

PLANE = 4
"""Dimensions of a batch of images; series have one less."""


class LayerInput(NamedTuple):
    """How a layer applies its matrix: at every place to a row of features."""

    weight: str
    kernel: tuple[int, ...]
    """() of a dense layer."""
    settings: Mapping[str, Any]


def layer_input(operation: Operation) -> LayerInput | None:
    """How an operation is fed, if it applies a whole matrix at every place; None if it does not."""
    if operation.derived or operation.transposed or len(operation.shape) < 2:
        return None
    if operation.kind is Kind.DENSE:
        return LayerInput(operation.weight, (), {})
    kernel, settings = operation.shape[2:], operation.settings
    if operation.kind is Kind.CONVOLUTION and len(kernel) in (1, 2) and settings.get("groups", 1) == 1:
        return LayerInput(operation.weight, kernel, settings)
    return None


def inputs_of_layers(
    model: nn.Module, tensors: Update, layers: Sequence[LayerInput]
) -> Callable[[Tensor], list[Tensor]]:
    """The function from inputs (samples, *input_shape) to what each layer is fed, (samples, places, features) each.

    The layers are recognised by the parameter that they are called with, so that the function can be differentiated
    forwards and backwards and mapped over samples or directions. It stops behind the last of them.
    """

    def fed(inputs: Tensor) -> list[Tensor]:
        mode = _Catch({id(tensors[layer.weight]): layer for layer in layers})
        try:
            with mode:
                functional_call(model, dict(tensors), (inputs,))
        except _AllCaught:
            pass
        return [at_places(mode.caught[layer.weight], layer) for layer in layers]

    return fed


def at_places(data: Tensor, layer: LayerInput) -> Tensor:
    """What a layer's matrix is multiplied with, (samples, places, features), of what its operation is fed."""
    if not layer.kernel:
        return data.unsqueeze(1) if data.dim() == 2 else data.flatten(1, -2)
    kernel, stride, dilation = layer.kernel, *(_sides(layer, name) for name in ("stride", "dilation"))
    padding = layer.settings.get("padding", 0)
    if padding == "same":
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        data = pad(data, [width for total in reversed(around) for width in (total // 2, total - total // 2)])
    padding = (0,) * len(kernel) if isinstance(padding, str) else _sides(layer, "padding")
    if data.dim() < PLANE:
        data, kernel, stride, dilation, padding = (
            data.unsqueeze(2),
            (1, *kernel),
            (1, *stride),
            (1, *dilation),
            (0, *padding),
        )
    return unfold(data, kernel, dilation, padding, stride).transpose(1, 2)


def _sides(layer: LayerInput, name: str) -> tuple[int, ...]:
    value = layer.settings.get(name, 0 if name == "padding" else 1)
    several = tuple(value) if isinstance(value, list | tuple) else (value,)
    return several * len(layer.kernel) if len(several) == 1 else several


class _AllCaught(Exception):
    """Every layer was reached: what lies behind the last one need not be computed."""


class _Catch(TorchFunctionMode):
    def __init__(self, wanted: Mapping[int, LayerInput]) -> None:
        super().__init__()
        self.wanted = wanted
        self.caught: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        layer = self.wanted.get(id(weight)) if isinstance(weight, Tensor) else None
        if layer is not None and layer.weight not in self.caught:
            call = TorchCall(func, args, kwargs)
            if call.name in ("linear", "conv1d", "conv2d"):
                self.caught[layer.weight] = call.argument(0, "input")
                if len(self.caught) == len(self.wanted):
                    raise _AllCaught
        return func(*args, **kwargs)
