"""The batch-norm layers of a network."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batchnorm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every batch-norm layer by its name, in the order of the model."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
