"""Why a model refuses a batch, in one sentence that names the layer."""

from __future__ import annotations

import torch
from torch import nn

from fedprism.errors import first_line
from fedprism.inputs import outputs_of
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.types import Batch, Update


def refusal(model: nn.Module, tensors: Update, batch: Batch, error: ValueError) -> str:
    """The sentence; where batch norm refuses, in train mode and with one value a channel, which layer."""
    layer = _last_batchnorm(model, tensors, batch) if "more than 1 value" in str(error) else None
    if layer is not None:
        return (
            f"the batch-norm layer '{layer}' normalises by the batch in train mode and needs at least two "
            f"samples, not {len(batch)}. Raise the batch size, train with training=False, or use "
            "GroupNorm instead."
        )
    return (
        f"the model does not accept a batch of {len(batch)} ({first_line(error)}). Change the batch, "
        "or train with training=False."
    )


def _last_batchnorm(model: nn.Module, tensors: Update, batch: Batch) -> str | None:
    """The batch-norm layer that a forward pass came to last."""
    entered: list[str] = []
    names = {layer: name for name, layer in batchnorm_layers(model).items() if layer.training}
    hooks = [layer.register_forward_pre_hook(lambda at, _: entered.append(names[at])) for layer in names]
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            outputs_of(model, copies, batch.inputs)
    except ValueError:
        return entered[-1] if entered else None
    finally:
        for hook in hooks:
            hook.remove()
    return None
