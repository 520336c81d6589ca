"""The layer that cuts an input into patches, and the position parameter that is added to what it makes of them.

A convolution whose stride is its kernel, and a dense layer that is fed rearranged pixels, are the same thing: one
matrix applied to every patch. Which pixels a patch holds, and which entries of a parameter are added to its embedding,
is read off numbers that are sent through the network, so it does not matter how a model is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprism.errors import NotApplicable
from fedprism.network.beginning import first_operations
from fedprism.network.first_attention import FirstAttention, first_attention
from fedprism.network.operations import Operation
from fedprism.network.torch_calls import Kind
from fedprism.types import Observation, Update

DIGIT_ERROR = 0.1
"""How far a number that was sent through a network may be from a whole number: above float32 rounding, below half."""
BEFORE_SIDES = 2
"""Dimensions of a convolution's data before its sides: samples and channels."""


class PatchLayer(NamedTuple):
    """One matrix applied to every patch: embedding = weight (slope * pixels + offset) + bias."""

    weight: str
    bias: str | None
    transposed: bool
    pixels: Tensor
    """(patches, features): the number of each value in the flattened input."""
    slope: Tensor
    """(patches, features)"""
    offset: Tensor
    """(patches, features)"""
    position: str | None
    """The parameter that is added to the embeddings, entry by entry; None if there is none."""
    places: Tensor | None
    """(patches, channels): the number of each added value in the flattened parameter."""
    attention: FirstAttention | None
    """The first dense layers that see every patch by itself."""

    def rows(self, gradient: Update) -> Tensor:
        """The weight's gradient as a matrix (channels, features)."""
        matrix = gradient[self.weight]
        return matrix.T if self.transposed else matrix.flatten(1)

    def at_patches(self, gradient: Update) -> Tensor | None:
        """The gradient at each patch's embedding (patches, channels), summed over samples; None if it was not sent."""
        if self.position is None or self.places is None or self.position not in gradient:
            return None
        return gradient[self.position].flatten()[self.places.to(gradient[self.position].device)]

    def fed(self, level: Tensor) -> Tensor:
        """What the layer is fed (patches, features) by a flattened input."""
        return self.slope.to(level) * level[self.pixels.to(level.device)] + self.offset.to(level)

    def inputs(self, fed: Tensor, level: Tensor) -> Tensor:
        """The flattened inputs (samples, values) that feed (samples, patches, features); `level` where no patch is."""
        flat = level.to(fed).repeat(len(fed), 1)
        values = (fed - self.offset.to(fed)) / self.slope.to(fed)
        flat[:, self.pixels.flatten().to(fed.device)] = values.flatten(1)
        return flat


def patch_layer(observation: Observation) -> PatchLayer | None:
    """The patch layer of a network and its position parameter; None if the input feeds no such layer."""
    knowledge, model, round = observation.knowledge, observation.model, observation.rounds[0]
    shape = knowledge.sample_shape
    if knowledge.input_shape is None or model is None:
        raise NotApplicable("expected the model and its input_shape to look for patches; grant both.")
    tensors = {**round.params, **(round.buffers_before or {})}
    numbered = _numbered_inputs(math.prod(shape)).to(next(iter(round.params.values()))).view(-1, *shape)
    try:
        operations = first_operations(model, tensors, numbered)
        first = next((operation for operation in operations if operation.kind is not Kind.ADDED), None)
        fed = None if first is None else _patches(first, tensors)
        if first is None or fed is None:
            return None
        origin = _origin(fed, math.prod(shape))
        if origin is None:
            return None
        position, places = _position(observation, tensors, operations, first)
        embedded = _embeddings(first) - (0 if first.bias is None else tensors[first.bias])
        attention = first_attention(operations, embedded, tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise NotApplicable(f"expected the model to accept inputs of shape {shape}, found: {reason}.") from error
    return PatchLayer(first.weight, first.bias, first.transposed, *origin, position, places, attention)


def _numbered_inputs(size: int) -> Tensor:
    """Four inputs: zeros, ones, and each value's number as two digits between 0 and 1."""
    numbers, base = torch.arange(size), _base(size)
    return torch.stack([torch.zeros(size), torch.ones(size), numbers // base / base, numbers % base / base])


def _base(size: int) -> int:
    return math.isqrt(size) + 1


def _patches(operation: Operation, tensors: Update) -> Tensor | None:
    """What a layer is fed, as (samples, patches, features); None if its places overlap or it is no such layer."""
    data = operation.inputs
    if operation.derived:
        return None
    if operation.kind is Kind.DENSE:
        return data.flatten(1, -2) if data.dim() > BEFORE_SIDES else None
    kernel = tuple(tensors[operation.weight].shape[BEFORE_SIDES:])
    if operation.kind is not Kind.CONVOLUTION or not _apart(operation, kernel):
        return None
    sides = len(kernel)
    for side, length in enumerate(kernel):
        data = data.unfold(BEFORE_SIDES + side, length, length)
    data = data.movedim(1, 1 + sides)  # samples, grid, channels, kernel
    return data.flatten(1 + sides).flatten(1, sides)


def _apart(operation: Operation, kernel: Sequence[int]) -> bool:
    """Whether a convolution's places touch and do not overlap."""

    def setting(name: str, usual: int) -> list[Any]:
        value = operation.settings.get(name, usual)
        return list(value) if isinstance(value, list | tuple) else [value] * len(kernel)

    no_padding = operation.settings.get("padding") == "valid" or not any(setting("padding", 0))
    plain = no_padding and set(setting("dilation", 1)) == {1} and operation.settings.get("groups", 1) == 1
    return plain and setting("stride", 1) == list(kernel)


def _origin(fed: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which value of the input feeds each of (4, patches, features), its slope and offset; None if nothing so plain."""
    blank, ones, high, low = fed.double()
    slope, base = ones - blank, _base(size)
    if not bool((slope != 0).all()):
        return None
    digits = torch.stack([high - blank, low - blank]) / slope * base
    whole = digits.round()
    pixels = (whole[0] * base + whole[1]).long()
    if not bool(((digits - whole).abs() < DIGIT_ERROR).all()) or not bool(((pixels >= 0) & (pixels < size)).all()):
        return None
    return (pixels, slope, blank) if len(torch.unique(pixels)) == pixels.numel() else None


def _position(
    observation: Observation, tensors: Update, operations: Sequence[Operation], first: Operation
) -> tuple[str | None, Tensor | None]:
    """The parameter that is added to every embedding, and which of its entries are added where."""
    embedded = _embeddings(first)
    for added in operations:
        tokens = None if added.kind is not Kind.ADDED else _tokens_of(embedded, added.inputs)
        if tokens is None:
            continue
        places = _places(observation, tensors, first, added, tokens)
        if places is not None:
            return added.weight, places
    return None, None


def _embeddings(first: Operation) -> Tensor:
    """What a patch layer returns, as (samples, patches, channels)."""
    if first.kind is Kind.CONVOLUTION:
        return first.outputs.flatten(BEFORE_SIDES).transpose(1, 2)
    return first.outputs.flatten(1, -2)


def _tokens_of(embedded: Tensor, data: Tensor) -> Tensor | None:
    """Which values of data (samples, ...) the embeddings (samples, patches, channels) are: (patches, channels)."""
    channels = embedded.shape[2]
    numbers = torch.arange(data[0].numel(), device=data.device).view(data.shape[1:])
    for tokens, order in ((data, numbers), (data.movedim(1, -1), numbers.movedim(0, -1))):
        if data.dim() <= BEFORE_SIDES or tokens.shape[-1] != channels or len(tokens) != len(embedded):
            continue
        found = _same_rows(embedded.transpose(0, 1).flatten(1), tokens.flatten(1, -2).transpose(0, 1).flatten(1))
        if found is not None:
            return order.flatten(0, -2)[found]
    return None


def _same_rows(wanted: Tensor, among: Tensor) -> Tensor | None:
    """Where each row is among the others; None if one is not there, or two are the same."""
    _, groups = torch.unique(torch.cat([wanted, among]), dim=0, return_inverse=True)
    of_wanted, of_others = groups[: len(wanted)], groups[len(wanted) :]
    same = of_wanted.unsqueeze(1) == of_others.unsqueeze(0)
    return (
        same.long().argmax(1)
        if bool((same.sum(1) == 1).all()) and len(torch.unique(of_wanted)) == len(wanted)
        else None
    )


def _places(
    observation: Observation, tensors: Update, first: Operation, added: Operation, tokens: Tensor
) -> Tensor | None:
    """Which entries of the added parameter the tokens (patches, channels) get; None if several get the same one.

    The parameter is replaced by its entries' numbers, and the patch layer by zeros.
    """
    model, parameter = observation.model, tensors[added.weight]
    assert model is not None
    silent = {name: torch.zeros_like(tensors[name]) for name in (first.weight, first.bias) if name is not None}
    numbers = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape).to(parameter)
    blank = parameter.new_zeros(1, *observation.knowledge.sample_shape)
    operations = first_operations(model, {**tensors, **silent, added.weight: numbers}, blank)
    returned = next(operation.outputs for operation in operations if operation.number == added.number)
    places = returned[0].flatten()[tokens].double()
    whole = places.round().long()
    plain = bool((places == whole).all()) and bool(((whole >= 0) & (whole < parameter.numel())).all())
    return whole if plain and len(torch.unique(whole)) == whole.numel() else None
