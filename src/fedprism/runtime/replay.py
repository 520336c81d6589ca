"""ReLU and max-pooling that repeat the choices of an earlier pass, so that the network is smooth between the two.

The derivative of a gradient is that of the smooth piece of the network on which the guess lies. In a difference of two
gradients each unit that changes sides between them adds a jump: so the second pass takes every side of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

Keep = Callable[..., tuple[Tensor, Any]]
"""The function, which also returns its choices."""
Repeat = Callable[..., Tensor]
"""The function with these choices, its first argument."""


class Kinks(TorchFunctionMode):
    """Records, or repeats, the choices of functions with kinks, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.chooses = False
        """Whether anything was compared, rounded or drawn in the open, which cannot be repeated."""
        self._repeating: Iterator[Any] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        self.kept, self.chooses, self._repeating = [], False, None
        with self:
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        self._repeating, self.kept = iter(self.kept), []  # choices are freed after this pass
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _HELD:
            keep, repeat = _HELD[name]
            if self._repeating is not None:
                return repeat(next(self._repeating), *args, **kwargs)
            output, choices = keep(*args, **kwargs)
            self.kept.append(choices)
            return output
        output = func(*args, **kwargs)
        self.chooses = self.chooses or _chooses(name, args, output)
        return output


def _chooses(name: str, args: Sequence[Any], output: Any) -> bool:
    """Labels may be compared, and dropout that does nothing hands on what it was given."""
    if "dropout" in name:
        return output is not args[0]
    whole = bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
    return name.strip("_") in _CHOICES and not whole


def first_nonsmooth_op(repeated: Tensor) -> str:
    """A step behind a repeated loss that may still have a kink; empty where there is none."""
    nodes, visited = [repeated.grad_fn], set[Node]()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SMOOTH:
            return node.name()
        nodes.extend(following for following, _ in node.next_functions)
    return ""


def _keep_relu(input: Tensor, inplace: bool = False) -> tuple[Tensor, Tensor]:
    output = torch.relu_(input) if inplace else torch.relu(input)
    return output, output.detach()


def _repeat_relu(kept: Tensor, input: Tensor, inplace: bool = False) -> Tensor:
    if inplace:
        return input.mul_(kept > 0)
    return torch.ops.aten.threshold_backward(input, kept, 0)  # type: ignore[no-any-return]


def _keep_leaky(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> tuple[Tensor, Tensor]:
    slopes = torch.where(input.detach() > 0, 1.0, negative_slope)
    return F.leaky_relu(input, negative_slope, inplace), slopes


def _repeat_leaky(slopes: Tensor, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return input.mul_(slopes) if inplace else input * slopes


def _keep_pooling(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    kwargs.pop("return_indices", None)
    output, indices = F.max_pool2d_with_indices(input, *args, **kwargs)
    return output, indices


def _repeat_pooling(indices: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape)


_HELD: dict[str, tuple[Keep, Repeat]] = {
    "relu": (_keep_relu, _repeat_relu),
    "relu_": (
        lambda input: _keep_relu(input, inplace=True),
        lambda kept, input: _repeat_relu(kept, input, inplace=True),
    ),
    "leaky_relu": (_keep_leaky, _repeat_leaky),
    "max_pool2d": (_keep_pooling, _repeat_pooling),
}
# fmt: off
_CHOICES = frozenset({
    "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "sign", "sgn", "round", "floor", "ceil", "trunc",
    "argmax", "argmin", "sort", "argsort", "topk", "where", "heaviside", "bernoulli", "multinomial", "rand",
    "randn", "rand_like", "randn_like", "normal", "uniform",
})
"""Functions that choose, or draw, without leaving a trace in autograd's graph."""
_SMOOTH = frozenset({
    "torch::autograd::AccumulateGrad", "Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Dot", "Addcmul", "T",
    "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Expand", "Squeeze", "Unsqueeze",
    "Slice", "Select", "Index", "Gather", "Cat", "Stack", "Split", "SplitWithSizes", "Unbind", "Clone", "ToCopy",
    "Alias", "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Sqrt", "Rsqrt", "Mean", "Sum", "Var",
    "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "Sigmoid", "Tanh", "Gelu", "Silu",
    "Softplus", "Elu", "Softmax", "LogSoftmax", "AvgPool2D", "AdaptiveAvgPool2D", "ConstantPadNd", "NllLoss",
    "MseLoss", "Linear", "ThresholdBackward", "Embedding", "Im2Col",
})
"""Steps of autograd's graph, without "Backward", that have a derivative everywhere."""
# fmt: on
