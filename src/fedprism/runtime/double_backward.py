"""Layers that are cheap to differentiate twice: matching a gradient differentiates the gradient itself.

The derivatives of a convolution by its input and by its weight are bilinear, and their own derivatives are again a
convolution and these two: every pass runs on the three kernels that libraries tune, where autograd would write one of
them as a convolution with a kernel as large as the image. Batch norm by fixed statistics is an affine map of each
channel, whose second derivative costs next to nothing. On a CPU a convolution at few positions is a product of
matrices. Which way is taken depends on shapes alone, so that runs repeat.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def positions(self, inputs: Tensor, kernel: tuple[int, ...]) -> list[int]:
        """Height and width of the output."""
        sides = zip(inputs.shape[2:], kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(side + 2 * edge - gap * (size - 1) - 1) // step + 1 for side, size, step, edge, gap in sides]


MANY_WEIGHTS = 10_000
"""Weights below which a convolution on a CPU is small: reaching the three kernels costs more than they save."""
FEW_COPIES = 40_000
"""Entries of a small convolution's windows above which copying them costs more than a library takes to start."""


def for_second_derivatives(model: nn.Module) -> nn.Module:
    """A copy of the model, with its parameters, that computes the same and is cheap to differentiate twice.

    It serves gradients by the parameters, recorded, and then derivatives of these by the inputs, not recorded.
    Layers that are not exactly PyTorch's stay as they are.
    """
    model = copy_layers(model)
    for layer in model.modules():
        if _plain_convolution(layer):
            layer.__class__ = _Convolution
        elif type(layer) is nn.BatchNorm2d and not layer.training and layer.running_mean is not None:
            layer.__class__ = _FixedBatchNorm
    return model


def for_first_derivatives(model: nn.Module) -> nn.Module:
    """A copy of the model, with its parameters, whose small convolutions are products on a CPU."""
    model = copy_layers(model)
    for layer in filter(_plain_convolution, model.modules()):
        if layer.weight.numel() < MANY_WEIGHTS and not layer.weight.is_cuda:
            layer.__class__ = _Convolution
    return model


def _plain_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def copy_layers(model: nn.Module) -> nn.Module:
    """A copy of the layers that shares the model's parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def install_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Replace the model's parameters and buffers of these names; shared ones stay shared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    new = {id(old): tensors[name] for name, old in named if name in tensors}
    for layer in model.modules():
        for table in (layer._parameters, layer._buffers):
            table.update({name: new.get(id(old), old) for name, old in table.items()})  # type: ignore[misc]
    return model


class _Convolution(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        assert not isinstance(self.padding, str)
        geometry, weights = Geometry(self.stride, self.padding, self.dilation, self.groups), self.weight.numel()
        small = weights < MANY_WEIGHTS and not input.is_cuda
        if not input.is_cuda and input.dim() == 4:
            high, wide = geometry.positions(input, self.kernel_size)
            positions = len(input) * high * wide
            copies = positions * (weights // self.out_channels)
            few = copies <= FEW_COPIES if small else positions <= self.out_channels
            if few and self.groups == 1:
                columns, weight = _columns(input, self.kernel_size, geometry), self.weight.flatten(1)
                product = weight @ columns if self.bias is None else torch.addmm(self.bias[:, None], weight, columns)
                return product.view(self.out_channels, len(input), high, wide).transpose(0, 1).contiguous()
        if small:
            return super().forward(input)
        output: Tensor = _Convolve.apply(input, self.weight, self.bias, geometry)
        return output


def _columns(inputs: Tensor, kernel: tuple[int, ...], geometry: Geometry) -> Tensor:
    """What each position of a convolution is computed from: (weights of an output, batch * positions)."""
    stride, padding, dilation, _ = geometry
    windows = F.unfold(inputs, kernel, dilation, padding, stride)
    return windows[0] if len(inputs) == 1 else windows.transpose(0, 1).flatten(1)


class _FixedBatchNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        scale = (self.running_var + self.eps).rsqrt()
        if not self.affine:
            return (input - _channels(self.running_mean)) * _channels(scale)
        scale = self.weight * scale
        return torch.addcmul(_channels(self.bias - self.running_mean * scale), input, _channels(scale))


def _channels(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


class _Convolve(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry
        stride, padding, dilation, groups = geometry
        return torch.convolution(inputs, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        by_inputs, by_weight, by_bias, _ = ctx.needs_input_grad
        # The recorded pass asks for the parameters' gradients, not for the images'; the last pass the other way round.
        recorded = torch.is_grad_enabled()
        return (
            _ByInputs.apply(gradient, weight, inputs, ctx.geometry)
            if by_inputs and not (recorded and inputs.is_leaf)
            else None,
            _ByWeight.apply(gradient, inputs, weight, ctx.geometry)
            if by_weight and (recorded or not weight.is_leaf)
            else None,
            gradient.sum((0, 2, 3)) if by_bias else None,
            None,
        )


class _ByInputs(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, inputs: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(gradient, weight)
        ctx.geometry = geometry
        return _backward(gradient, inputs, weight, geometry, (True, False, False))[0]

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        by_gradient, by_weight, *_ = ctx.needs_input_grad
        by_weight = by_weight and (torch.is_grad_enabled() or not weight.is_leaf)
        return (
            _Convolve.apply(change, weight, None, ctx.geometry) if by_gradient else None,
            _ByWeight.apply(gradient, change, weight, ctx.geometry) if by_weight else None,
            None,
            None,
        )


class _ByWeight(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(gradient, inputs)
        ctx.geometry = geometry
        return _backward(gradient, inputs, weight, geometry, (False, True, False))[1]

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        gradient, inputs = ctx.saved_tensors
        by_gradient, by_inputs, *_ = ctx.needs_input_grad
        return (
            _Convolve.apply(inputs, change, None, ctx.geometry) if by_gradient else None,
            _ByInputs.apply(gradient, change, inputs, ctx.geometry) if by_inputs else None,
            None,
            None,
        )


def _backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    flipped = (0,) * len(stride)
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        gradient, inputs, weight, None, stride, padding, dilation, False, flipped, groups, wanted
    )
