"""Watch one forward pass: what modules are fed and what they return. Works for modules and functions alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.types import Update


class ModuleCall(NamedTuple):
    """One call of a module; `name` is the module's in the network."""

    name: str
    module: nn.Module
    inputs: Tensor
    outputs: Tensor


def watch(
    model: nn.Module, tensors: Update, inputs: Tensor, modules: Iterable[nn.Module]
) -> tuple[list[ModuleCall], Tensor]:
    """The calls of these modules in the order of execution, in evaluation mode, and the network's outputs."""
    calls: list[ModuleCall] = []
    names = {module: name for name, module in model.named_modules()}

    # Copies, because an activation may work in place.
    def fed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(ModuleCall(names[module], module, args[0].detach().clone(), args[0]))

    def returned(module: nn.Module, _: tuple[Tensor, ...], outputs: Tensor) -> None:
        calls[-1] = calls[-1]._replace(outputs=outputs.detach().clone())

    hooks = [hook for m in modules for hook in (m.register_forward_pre_hook(fed), m.register_forward_hook(returned))]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), evaluating(model):
            outputs = functional_call(model, {**buffers, **tensors}, (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    return calls, outputs


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal; of tensors without numbers, whether their shapes are."""
    return first.shape == second.shape and (first.is_meta or torch.equal(first, second))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model is in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
