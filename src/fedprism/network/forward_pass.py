"""What readers of a forward pass share: whether tensors are the same, and evaluation mode for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
