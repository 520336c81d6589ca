"""The operations of a network's beginning, up to its first attention: all that a look at its patches needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from fedprism.network.operations import Operation, operations_of
from fedprism.types import Update

ATTENDING = frozenset({"scaled_dot_product_attention", "softmax", "multi_head_attention_forward"})
"""Functions of torch, by the last part of their name, that mix tokens."""
NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm"})
"""The same of those that begin the next layer."""
PREFIX = "model."
"""What the names of parameters begin with inside `_Beginning`."""


def first_operations(model: nn.Module, tensors: Update, inputs: Tensor) -> list[Operation]:
    """The operations with parameters up to the first attention; all of them if there is none."""
    inside = {PREFIX + name: tensor for name, tensor in tensors.items()}
    operations, _ = operations_of(_Beginning(model), inside, inputs)
    return [
        dataclasses.replace(
            operation,
            weight=operation.weight.removeprefix(PREFIX),
            bias=None if operation.bias is None else operation.bias.removeprefix(PREFIX),
            further=tuple(name.removeprefix(PREFIX) for name in operation.further),
        )
        for operation in operations
    ]


class _Reached(Exception):
    """The first attention was left: what lies behind it need not be computed."""


class _Beginning(nn.Module):
    """A network that ends at its first attention, and returns nothing of meaning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            with _UntilAttention():
                self.model(inputs)
        except _Reached:
            pass
        return inputs


class _UntilAttention(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.attended = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        if self.attended and name in ATTENDING | NORMS:
            raise _Reached
        self.attended = self.attended or name in ATTENDING
        return func(*args, **(kwargs or {}))
