"""What stands between a network's input and its first dense layer, where it only moves and scales every value.

Models often normalise their pixels themselves, by a module of their own or by batch normalisation. What such a layer is
fed is then the input up to a known map, not a feature that has to be inverted by a search.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.network.batchnorm import batchnorm_layers
from fedprism.network.operations import Operation
from fedprism.network.splitting import features_before
from fedprism.types import Inputs, Observation, Round

PROBES = 4
"""Number of random inputs that must obey the map."""
REACH = 3.0
"""How far from zero they reach; bounds pixels that are normalised by their mean and standard deviation."""
AGREEMENT = 1e-4
"""Largest error of the map, relative to the largest value: above the rounding of float32 through a few layers."""


class Entrance(NamedTuple):
    """fed = slope * input + offset, value by value; both (1, d)."""

    slope: Tensor
    offset: Tensor
    by_running_statistics: bool
    """Whether batch normalisation takes part: a client in train mode normalises by its own batch instead."""

    def inputs(self, fed: Tensor, *, scaled: bool) -> Tensor:
        """The network's inputs (n, d) of which the layer is fed `fed` (n, d).

        Where that is not known in its `scaled` form, neither is what to take away from it.
        """
        return ((fed - self.offset) if scaled else fed) / self.slope

    def box(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range (1, d) of what the layer is fed, of inputs in a range (1, d)."""
        ends = self.slope * low + self.offset, self.slope * high + self.offset
        return torch.minimum(*ends), torch.maximum(*ends)


def entrance_of(observation: Observation, layer: Operation) -> Entrance | None:
    """The map from the input to what the layer is fed; None where it is no such map.

    Images of zeros and of ones tell slope and offset, random inputs whether there is nothing else to it.
    """
    shape = observation.knowledge.sample_shape
    if layer.inputs.dim() != 2 or layer.inputs.shape[1] != math.prod(shape):
        return None
    fed_by = features_before(observation, observation.rounds[0], layer)
    blank = torch.zeros(1, *shape, dtype=layer.inputs.dtype, device=layer.inputs.device)
    noise = torch.rand(PROBES, *shape, generator=torch.Generator().manual_seed(1)).to(blank)
    probes = REACH * (2 * noise - 1)
    with torch.no_grad():
        offset, one, fed = fed_by(blank), fed_by(blank + 1), fed_by(probes)
    slope = one - offset
    apart = (fed - slope * probes.flatten(1) - offset).abs().max()
    if not bool(apart <= AGREEMENT * fed.abs().max()) or not bool((slope != 0).all()):
        return None
    return Entrance(slope, offset, by_running_statistics=depends_on_running_statistics(observation, layer, blank))


def depends_on_running_statistics(observation: Observation, layer: Operation, inputs: Inputs) -> bool:
    """Whether what a layer is fed changes with the running means of batch norm."""
    assert observation.model is not None
    if not batchnorm_layers(observation.model):
        return False
    rounds = observation.rounds[0], _with_moved_means(observation)
    with torch.no_grad():
        fed, moved = (features_before(observation, each, layer)(inputs) for each in rounds)
    return not torch.equal(fed, moved)


def _with_moved_means(observation: Observation) -> Round:
    """The first round, with other running means in every batch-norm layer that keeps them."""
    assert observation.model is not None
    first, model = observation.rounds[0], observation.model
    buffers = {**dict(model.named_buffers()), **(first.buffers_before or {})}
    means = {f"{name}.running_mean" for name in batchnorm_layers(model)} & buffers.keys()
    return dataclasses.replace(first, buffers_before={**buffers, **{name: buffers[name] + 1 for name in means}})
