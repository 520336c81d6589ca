"""Convolutions as products of windows, for many networks at once on a GPU.

With weights of its own for every trial, a convolution becomes one of as many groups as there are trials, and its second
derivative is computed group by group: thousands of small kernels. The same sums as products of matrices take a number
of kernels that does not depend on how many trials there are. On a CPU groups are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode


class AsProducts(TorchFunctionMode):
    """While it is entered, plain two-dimensional convolutions are computed by `windowed`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d and not kwargs and len(args) == 7:
            inputs, weight, bias, stride, padding, dilation, groups = args
            if groups == 1 and tuple(dilation) == (1, 1) and not isinstance(padding, str) and inputs.dim() == 4:
                return windowed(inputs, weight, bias, stride, padding)
        return func(*args, **(kwargs or {}))


def windowed(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The convolution of (batch, channels, height, width) with (out, channels, rows, columns)."""
    bordered = pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
    windows = bordered.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[1])
    # (batch, channels, high, wide, rows, columns) -> (batch, channels * rows * columns, high * wide)
    high, wide = windows.shape[2:4]
    columns = windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)
    outputs = weight.flatten(1) @ columns
    outputs = outputs if bias is None else outputs + bias.unsqueeze(1)
    return outputs.reshape(*outputs.shape[:2], high, wide)
