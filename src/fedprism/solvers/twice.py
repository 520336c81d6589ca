"""Layers that are cheap to differentiate twice: matching a gradient differentiates the gradient itself.

The derivative of a convolution by its input and that by its weight are again bilinear, and their derivatives are once
more a convolution and these two. Said so, every pass runs on the three kernels that libraries tune; left to itself,
autograd writes one of them as a convolution whose kernel is as large as the image. Batch norm by fixed statistics is
an affine map of each channel, whose second derivative costs next to nothing; as a batch norm it costs some thirty
passes over the features. A small convolution of a single image is a product of matrices on a CPU, where a library
takes longer to prepare its kernels than to run them.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


MANY_WEIGHTS = 10_000
"""On a CPU convolutions of fewer weights are small: the way to the three kernels costs more than they save."""


def for_second_derivatives(model: nn.Module) -> nn.Module:
    """A copy of the model, of the same layers by name, that computes the same and is cheap to differentiate twice.

    It serves gradients by the parameters, recorded, and then derivatives of these by the inputs, not recorded: what
    a pass is not asked for is left out. Layers that are not exactly PyTorch's own stay as they are.
    """
    model = copy.deepcopy(model)
    for layer in model.modules():
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            small = not layer.weight.is_cuda and layer.weight.numel() < MANY_WEIGHTS
            layer.__class__ = _SmallConvolution if small else _Convolution
        elif type(layer) is nn.BatchNorm2d and not layer.training and layer.running_mean is not None:
            layer.__class__ = _FixedBatchNorm
    return model


class _SmallConvolution(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 1 or self.groups > 1:
            return super().forward(input)
        assert not isinstance(self.padding, str)
        patches = F.unfold(input, self.kernel_size, self.dilation, self.padding, self.stride)[0]
        weight = self.weight.flatten(1)
        output = weight @ patches if self.bias is None else torch.addmm(self.bias[:, None], weight, patches)
        reach, padded = self.dilation[0] * (self.kernel_size[0] - 1), input.shape[2] + 2 * self.padding[0]
        return output.view(1, len(weight), (padded - reach - 1) // self.stride[0] + 1, -1)


class _Convolution(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        assert not isinstance(self.padding, str)
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _Convolve.apply(input, self.weight, self.bias, geometry)
        return output


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
