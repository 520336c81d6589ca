"""The layer that cuts an input into patches, and the position parameter that is added to what it makes of them.

A convolution whose windows do not overlap, and a dense layer that is fed rearranged pixels, are the same thing: one
matrix applied to every patch, which is fed every pixel once at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.network.first_attention import (
    BehindFirstAttention,
    FirstAttention,
    first_attention,
    samples_first,
    tokens_of,
)
from fedprism.network.operations import Operation
from fedprism.network.places import BEFORE_SIDES, PlacedLayer, numbered_pass
from fedprism.network.torch_calls import Kind
from fedprism.types import Observation, Update


class PatchLayer(NamedTuple):
    """One matrix applied to every patch: embedding = weight (slope * pixels + offset) + bias."""

    placed: PlacedLayer
    position: str | None
    """The parameter that is added to the embeddings, entry by entry; None if there is none."""
    added: Tensor | None
    """(patches, channels): the number of each added value in the flattened parameter."""
    attention: FirstAttention | None
    """The first dense layers that see every patch by itself."""

    @property
    def weight(self) -> str:
        return self.placed.operation.weight

    def at_patches(self, gradient: Update) -> Tensor | None:
        """The gradient at each patch's embedding (patches, channels), summed over samples; None if it was not sent."""
        if self.position is None or self.added is None or self.position not in gradient:
            return None
        return gradient[self.position].flatten()[self.added.to(gradient[self.position].device)]

    def fed(self, level: Tensor) -> Tensor:
        """What the layer is fed (patches, features) by a flattened input."""
        _, pixels, slope, offset = self.placed
        return slope.to(level) * level[pixels.to(level.device)] + offset.to(level)

    def inputs(self, fed: Tensor, level: Tensor) -> Tensor:
        """The flattened inputs (samples, values) that feed (samples, patches, features); `level` where no patch is."""
        _, pixels, slope, offset = self.placed
        flat = level.to(fed).repeat(len(fed), 1)
        values = (fed - offset.to(fed)) / slope.to(fed)
        flat[:, pixels.flatten().to(fed.device)] = values.flatten(1)
        return flat


def patch_layer(observation: Observation) -> PatchLayer | None:
    """The patch layer of a network and its position parameter; None if the input feeds no such layer."""
    numbered, sent = numbered_pass(observation, until=BehindFirstAttention()), observation.rounds[0].sent
    first = next((operation for operation in numbered.operations if operation.kind is not Kind.ADDED), None)
    if first is None or first.kind not in (Kind.CONVOLUTION, Kind.DENSE) or first.inputs.dim() <= BEFORE_SIDES:
        return None
    placed = numbered.placed(first)
    if placed is None or not bool(placed.slope.all()) or not _all_differ(placed.entries):
        return None
    channels_last = first.outputs.movedim(1, -1) if first.kind is Kind.CONVOLUTION else first.outputs
    embedded = channels_last.flatten(1, -2) - (0 if first.bias is None else sent[first.bias])
    attention = first_attention(numbered.operations, embedded, sent)
    for operation in numbered.operations:
        added = None if operation.kind is not Kind.ADDED else _added(operation, embedded, sent)
        if added is not None:
            return PatchLayer(placed, operation.weight, added, attention)
    return PatchLayer(placed, None, None, attention)


def _added(addition: Operation, embedded: Tensor, sent: Update) -> Tensor | None:
    """Which entries of its parameter the embeddings get (patches, channels); None if several get the same one."""
    entries = addition.entries
    if (entries is None and addition.derived) or addition.inputs.shape != addition.outputs.shape:
        return None
    if entries is None:
        entries = torch.arange(sent[addition.weight].numel()).view(addition.shape)
    entries = entries.cpu().expand(addition.outputs.shape)
    for inputs, numbers in ((addition.inputs, entries), (addition.inputs.movedim(1, -1), entries.movedim(1, -1))):
        tokens = tokens_of(embedded, inputs)
        if tokens is not None:
            added = samples_first(numbers, len(embedded))[0][tokens.cpu()]
            return added if _all_differ(added) else None
    return None


def _all_differ(numbers: Tensor) -> bool:
    return len(torch.unique(numbers)) == numbers.numel()
