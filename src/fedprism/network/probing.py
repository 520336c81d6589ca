"""The map of a network whose inputs nobody described: for a server that sets parameters before anybody trains them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.losses import predictions
from fedprism.network.forward_pass import evaluating
from fedprism.network.network_map import SAMPLES, NetworkMap
from fedprism.network.operations import operations_of
from fedprism.network.places import BEFORE_SIDES
from fedprism.network.stack import MOST_SIDE, USUAL_SIDES
from fedprism.types import Update

USUAL_STEPS = 16
"""Steps of a series, or words of a text, that are tried."""
MOST_PARAMETERS = 4
"""Parameters that are tried as the first layer's: class tokens and positions come before it in some models."""


def probed_map(model: nn.Module, params: Update) -> NetworkMap | None:
    """The map by the first inputs of a likely shape that the model takes; None if it takes none of them."""
    rng, like = torch.Generator().manual_seed(0), next(iter(params.values()))
    for shape, dtype in _likely(params):
        if not _takes(model, params, torch.empty(SAMPLES, *shape, dtype=dtype, device="meta")):
            continue
        numbers = torch.rand(SAMPLES, *shape, generator=rng) - 0.5
        inputs = numbers.to(like) if dtype.is_floating_point else (numbers > 0).to(like.device, dtype)
        operations, outputs = operations_of(model, params, inputs)
        return NetworkMap(inputs=inputs, outputs=predictions(outputs), operations=operations)
    return None


def _likely(params: Update) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types that fit one of the first matrices or kernels: vectors, series, words and pictures."""
    several = [tensor for tensor in params.values() if tensor.dim() > 1]
    for first in several[:MOST_PARAMETERS]:
        width, sides = first.shape[1], first.dim() - BEFORE_SIDES
        if sides:
            for side in dict.fromkeys((*USUAL_SIDES, *range(4, MOST_SIDE))):
                yield (width, *[side] * sides), first.dtype
        else:
            yield from (((width,), first.dtype), ((USUAL_STEPS, width), first.dtype), ((USUAL_STEPS,), torch.long))


def _takes(model: nn.Module, params: Update, blank: Tensor) -> bool:
    """Whether the model takes such inputs, without computing anything."""
    shadows = {name: tensor.to("meta") for name, tensor in (*model.named_buffers(), *params.items())}
    try:
        with torch.no_grad(), evaluating(model):
            functional_call(model, shadows, (blank,))
    except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
        return False
    return True
