"""The first dense layers behind a patch layer that see every token by itself: the projections of the first attention.

They are fed weight (pixels) + fixed, normalised or not, where `fixed` is whatever the network adds to a patch's
embedding: a bias, and a position that nobody trains or whose gradient is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.network.operations import Operation
from fedprism.network.torch_calls import Kind
from fedprism.types import Update

SAME_TOKEN = 1e-4
"""Largest distance of a token from its patch's embedding, relative to their size: above float32 rounding."""
SAME_DIRECTION = 1e-6
"""One less the cosine of a normalised token and what a norm should make of it: above float32 rounding."""
PROJECTING = (Kind.DENSE, Kind.ATTENTION)
ATTENDING = frozenset({"scaled_dot_product_attention", "softmax", "multi_head_attention_forward"})
"""Functions of torch that mix tokens."""
NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm"})
"""Functions of torch that begin the next layer."""


class BehindFirstAttention:
    """Whether a forward pass has left its first attention, told the names of torch's functions one after another."""

    def __init__(self) -> None:
        self.attended = False

    def __call__(self, name: str) -> bool:
        behind = self.attended and name in ATTENDING | NORMS
        self.attended = self.attended or name in ATTENDING
        return behind


class FirstAttention(NamedTuple):
    """token = weight (what the patch layer is fed) + fixed; the projections are fed gain * (token / size) + shift."""

    projections: tuple[Operation, ...]
    fixed: Tensor
    """(patches, channels): all that is added to a patch's embedding, its bias too."""
    tokens: int
    """Of one sample, class tokens too."""
    gain: Tensor | None
    """(channels,): the scale of the norm in between; None if there is no norm, and then no size either."""
    shift: Tensor | None
    """(channels,)"""
    centred: bool
    """Whether the norm takes away each token's mean."""

    def rows(self, gradient: Update) -> Tensor | None:
        """The gradients of the projections (rows, channels); None if none of them was sent."""
        sent = [projection.rows(gradient) for projection in self.projections if projection.weight in gradient]
        return torch.cat(sent) if sent else None


def first_attention(operations: Sequence[Operation], embedded: Tensor, tensors: Update) -> FirstAttention | None:
    """The projections that see every patch by itself; None if what they are fed cannot be followed.

    embedded (samples, patches, channels): what the patch layer returns without its bias, for a blank sample first.
    """
    for operation in operations:
        if operation.kind is Kind.NORM:
            data, returned = operation.inputs, operation.outputs
        elif operation.kind in PROJECTING:
            data = returned = operation.inputs
        else:
            continue
        tokens = tokens_of(embedded, data)
        if tokens is None:
            continue
        gain = shift = None
        centred = False
        if operation.kind is Kind.NORM:
            gain = tensors[operation.weight].double()
            shift = torch.zeros_like(gain) if operation.bias is None else tensors[operation.bias].double()
            kinds = [kind for kind in (True, False) if _normalises(data, returned, gain, shift, kind)]
            if not kinds:
                continue
            centred = kinds[0]
        projections = tuple(
            other
            for other in operations
            if other.kind in PROJECTING and not other.derived and _same(other.inputs, returned)
        )
        if projections:
            fixed = samples_first(data, len(embedded))[0][tokens].double() - embedded[0].double()
            return FirstAttention(projections, fixed, data[0].numel() // data.shape[-1], gain, shift, centred)
    return None


def samples_first(data: Tensor, samples: int) -> Tensor:
    """Tokens (samples, tokens, channels), also if they came as (tokens, samples, channels)."""
    data = data if data.shape[0] == samples else data.transpose(0, 1)
    return data.flatten(1, -2)


def tokens_of(embedded: Tensor, data: Tensor) -> Tensor | None:
    """Which token each patch is (patches,), told by what differs between samples; None if one cannot be told."""
    samples, patches, channels = embedded.shape
    if data.dim() < embedded.dim() or data.shape[-1] != channels or samples not in data.shape[:2]:
        return None
    tokens = samples_first(data, samples)
    changes, wanted = ((each[1:] - each[:1]).transpose(0, 1).flatten(1).double() for each in (tokens, embedded))
    distance, nearest = torch.cdist(wanted, changes).min(1)
    told = bool((distance <= SAME_TOKEN * wanted.norm(dim=1)).all()) and len(torch.unique(nearest)) == patches
    return nearest if told else None


def _normalises(data: Tensor, returned: Tensor, gain: Tensor, shift: Tensor, centred: bool) -> bool:
    """Whether each token becomes a multiple of itself, less its mean if `centred`, times the gain, plus the shift."""
    if gain.shape != data.shape[-1:]:
        return False
    data, returned = data.double(), returned.double()
    expected = gain * (data - data.mean(-1, keepdim=True) if centred else data)
    cosine = torch.cosine_similarity(expected, returned - shift, dim=-1)
    return bool((cosine > 1 - SAME_DIRECTION).all())


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, also if the first two dimensions are swapped."""
    return any(first.shape == each.shape and torch.equal(first, each) for each in (second, second.transpose(0, 1)))
