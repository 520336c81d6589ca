"""The map of a network: the operations that use a parameter, what feeds them, and how dense layers are connected.

Numbers are compared instead of code being read: it works for any `nn.Module`, with layers and activations as modules or
functions. Attacks look for their layer here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.errors import BadInput, NotApplicable
from fedprism.inputs import Inputs, map_tensors
from fedprism.losses import predictions
from fedprism.network.forward_pass import same
from fedprism.network.operations import Operation, operations_of
from fedprism.network.torch_calls import Kind, tensors_in
from fedprism.types import Observation

SAMPLES = 2
"""Random samples in the forward pass: the least that tell what depends on the input from what does not."""


class Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, float], Tensor]
    """The derivative by the activation's *output*; outputs below this share of their sample's largest count as zero."""


ACTIVATIONS = (
    Activation(lambda x: x, lambda z, _: torch.ones_like(z)),
    Activation(torch.relu, lambda z, tiny: (z > tiny * z.abs().amax(1, keepdim=True)).to(z)),
    Activation(torch.sigmoid, lambda z, _: z * (1 - z)),
    Activation(torch.tanh, lambda z, _: 1 - z.square()),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkMap:
    """One forward pass of random inputs. `operations` are in the order of execution."""

    inputs: Inputs
    outputs: Tensor
    operations: tuple[Operation, ...]

    @cached_property
    def layers(self) -> tuple[Operation, ...]:
        """The dense layers: products with a whole matrix. `Operation.rows` is that as (outputs, inputs)."""
        return tuple(o for o in self.operations if o.kind is Kind.DENSE and not o.derived and len(o.shape) == 2)

    def feeder(self, operation: Operation) -> Operation | None:
        """The last earlier operation whose outputs are what this one is fed, reshaped or in another order of axes."""
        earlier = [o for o in self.operations if o.number < operation.number]
        return next((o for o in reversed(earlier) if _same_numbers(o.outputs, operation.inputs)), None)

    def fed_by_input(self, sent: Container[str] | None = None) -> Operation | None:
        """The first dense layer whose input is the network's input, flattened; of those whose weights were sent."""
        inputs = self.inputs
        if not isinstance(inputs, Tensor):
            return None
        layers = (layer for layer in self.layers if sent is None or layer.weight in sent)
        return next((layer for layer in layers if same(layer.inputs, inputs.flatten(1))), None)

    def output_layer(self) -> Operation | None:
        """The dense layer whose output is the network's output."""
        return next((layer for layer in self.layers if same(layer.outputs, self.outputs)), None)

    def stack(self) -> tuple[tuple[Operation, ...], tuple[Activation, ...]] | None:
        """The layers and the activations between them, where the network is a plain stack of dense layers."""
        return self.stack_from(self.layers[0]) if self.layers and self.fed_by_input() is self.layers[0] else None

    def stack_from(self, first: Operation) -> tuple[tuple[Operation, ...], tuple[Activation, ...]] | None:
        """The layers from `first` on and the activations between them, where nothing else is there."""
        behind = [operation for operation in self.operations if operation.number >= first.number]
        layers = tuple(layer for layer in self.layers if layer.number >= first.number)
        if self.output_layer() is not layers[-1] or tuple(behind) != layers:
            return None
        between = []
        for before, after in pairwise(layers):
            activation = next((a for a in ACTIVATIONS if same(a.function(before.outputs), after.inputs)), None)
            if activation is None:
                return None
            between.append(activation)
        return layers, tuple(between)


def blank_batch(observation: Observation, samples: int) -> Inputs:
    """Zeros that the model can be fed, as precise as its parameters."""
    if observation.knowledge.input_shape is None or observation.model is None:
        raise NotApplicable("looking into the network needs the model and its input_shape. Grant both.")
    parameters = observation.rounds[0].params.values()
    return observation.knowledge.blank(samples, next(tensor for tensor in parameters if tensor.is_floating_point()))


def network_map(observation: Observation) -> NetworkMap:
    """The map by one forward pass of random inputs with the parameters of the first round."""
    rng = torch.Generator().manual_seed(0)

    def random(blank: Tensor) -> Tensor:
        """Fractions from 0 to 1; whole numbers 0 or 1, tokens of every network."""
        if blank.is_floating_point():
            return torch.rand(blank.shape, generator=rng).to(blank)
        return torch.randint(0, 2, blank.shape, generator=rng).to(blank)

    return map_of(observation, map_tensors(random, blank_batch(observation, SAMPLES)))


def map_of(observation: Observation, inputs: Inputs) -> NetworkMap:
    """The map by one forward pass of these inputs, at least two samples."""
    assert observation.model is not None
    operations, outputs = operations_of(observation.model, observation.rounds[0].sent, inputs)
    try:
        scores = predictions(outputs)
    except BadInput:  # the loss is of the user's own and makes something else of it
        scores = next(tensors_in(outputs))
    return NetworkMap(inputs=inputs, outputs=scores, operations=operations)


def _same_numbers(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever order and shape."""
    if first.numel() != second.numel() or first.dtype != second.dtype:
        return False
    return first.is_meta or torch.equal(first.flatten().sort().values, second.flatten().sort().values)
