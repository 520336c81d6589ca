"""The layers that the input feeds, and which of its entries they are fed at each of their places.

A place is where a layer applies its matrix once: a step of a recurrent layer, a position of a convolution, a token, one
of several inputs that share an encoder. Which entries arrive is read off numbers that are sent through the network, so
it does not matter how a model is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedprism.inputs import blank_inputs, unflattened, values_in
from fedprism.network.network_map import map_of
from fedprism.network.operations import Operation
from fedprism.network.torch_calls import Kind
from fedprism.types import Observation, Update

PROBES = 4
"""Zeros, ones, and each entry's number as two digits."""
DIGIT_ERROR = 0.1
"""How far a number that was sent through a network may be from a whole number: above float32 rounding, below half."""
BEFORE_SIDES = 2
"""Dimensions of a convolution's data before its sides: samples and channels."""


class PlacedLayer(NamedTuple):
    """One matrix applied at several places: fed = slope * entries + offset."""

    operation: Operation
    entries: Tensor
    """(places, features): the number of each entry in the flattened sample; what the slope is zero for is constant."""
    slope: Tensor
    """(places, features)"""
    offset: Tensor
    """(places, features)"""


def placed_layers(observation: Observation) -> list[PlacedLayer]:
    """The layers that are fed nothing but entries of the input, in the order of execution.

    A layer that is used several times, as by a shared encoder, is one layer with more places.
    """
    knowledge, first, model = observation.knowledge, observation.rounds[0], observation.model
    if model is None or knowledge.input_shape is None:
        return []
    tensors = {**first.params, **(first.buffers_before or {})}
    like = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    blank = blank_inputs(knowledge.input_shape, knowledge.input_types, PROBES, like)
    size = values_in(blank) // PROBES
    network = map_of(model, tensors, unflattened(_numbered(size), blank))
    layers: dict[str, PlacedLayer] = {}
    for operation in network.operations:
        placed = next((layer for layer in _readings(operation, tensors, size)), None)
        if placed is None:
            continue
        before = layers.get(operation.weight)
        layers[operation.weight] = placed if before is None else _together(before, placed)
    return list(layers.values())


def _together(first: PlacedLayer, second: PlacedLayer) -> PlacedLayer:
    joined = (torch.cat(pair) for pair in zip(first[1:], second[1:], strict=True))
    return PlacedLayer(first.operation, *joined)


def _numbered(size: int) -> Tensor:
    """Four samples: zeros, ones, and each entry's number, from 1, as two digits between 0 and 1.

    Entries of whole numbers lose both digits: what is made of them, such as a row of a table, then has no number.
    """
    numbers, base = torch.arange(1, size + 1).double(), _base(size)
    return torch.stack([torch.zeros(size), torch.ones(size), numbers // base / base, numbers % base / base])


def _base(size: int) -> int:
    return math.isqrt(size) + 1


def _readings(operation: Operation, tensors: Update, size: int) -> Iterator[PlacedLayer]:
    """What the layer is fed, for each axis of its data that may be that of the samples."""
    if operation.derived or not operation.inputs.is_floating_point():
        return
    for axis in range(min(2, operation.inputs.dim())):
        data = operation.inputs.movedim(axis, 0).cpu().double()
        fed = _places(operation, data, tensors) if len(data) == PROBES else None
        origin = None if fed is None else _origin(fed, size)
        if origin is not None:
            yield PlacedLayer(operation, *origin)


def _places(operation: Operation, data: Tensor, tensors: Update) -> Tensor | None:
    """What a layer is fed, as (samples, places, features); None if it is no such layer."""
    if operation.kind in (Kind.DENSE, Kind.RECURRENT):
        return data.unsqueeze(1) if data.dim() == BEFORE_SIDES else data.flatten(1, -2)
    kernel = tuple(tensors[operation.weight].shape[BEFORE_SIDES:])
    settings = operation.settings
    if operation.kind is not Kind.CONVOLUTION or settings.get("groups", 1) != 1 or settings.get("padding") == "same":
        return None
    stride = _each_side(settings.get("stride", 1), len(kernel))
    padding = _each_side(settings.get("padding", 0), len(kernel))
    if set(_each_side(settings.get("dilation", 1), len(kernel))) != {1}:
        return None
    around = [width for side in reversed(padding) for width in (side, side)]
    data = pad(data, around)
    for side, length in enumerate(kernel):
        data = data.unfold(BEFORE_SIDES + side, length, stride[side])
    data = data.movedim(1, 1 + len(kernel))  # samples, grid, channels, kernel
    return data.flatten(1 + len(kernel)).flatten(1, len(kernel))


def _each_side(value: object, sides: int) -> list[int]:
    if value == "valid":
        return [0] * sides
    return [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)] * sides  # type: ignore[call-overload]


def _origin(fed: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which entry feeds each of (4, places, features), its slope and offset; None if nothing so plain does."""
    blank, ones, high, low = fed
    slope = ones - blank
    constant = (high == blank) & (low == blank) & (slope == 0)
    digits = torch.stack([high - blank, low - blank]) / slope.where(~constant, 1.0) * _base(size)
    whole = digits.round()
    entries = (whole[0] * _base(size) + whole[1] - 1).where(~constant, 0.0)
    plain = ((digits - whole).abs() < DIGIT_ERROR).all(0) & (slope != 0) & (entries >= 0) & (entries < size)
    if not bool((plain | constant).all()) or bool(constant.all()):
        return None
    return entries.long(), slope, blank
