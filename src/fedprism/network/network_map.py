"""The map of a network: the operations that use a parameter, what feeds them, and how dense layers are connected.

Numbers are compared instead of code being read: it works for any `nn.Module`, with layers and activations as modules or
functions. Attacks look for their layer here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedprism.errors import BadInput, NotApplicable
from fedprism.inputs import Inputs, InputShape, InputTypes, blank_inputs, map_tensors
from fedprism.losses import predictions
from fedprism.network.forward_pass import same
from fedprism.network.operations import Operation, operations_of
from fedprism.network.torch_calls import Kind, tensors_in
from fedprism.types import Observation, Update

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
        """The dense layers: products with a whole matrix (outputs, inputs)."""
        return tuple(o for o in self.operations if o.kind is Kind.DENSE and not o.derived and not o.transposed)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names of parameters that several operations use: their gradient is the sum over these."""
        names = [name for o in self.operations for name in {o.weight, o.bias, *o.further} - {None}]
        return frozenset(name for name in names if name is not None and names.count(name) > 1)

    def feeder(self, operation: Operation) -> Operation | None:
        """The last earlier operation whose outputs are what this one is fed, reshaped or in another order of axes."""
        earlier = [o for o in self.operations if o.number < operation.number]
        return next((o for o in reversed(earlier) if _same_numbers(o.outputs, operation.inputs)), None)

    def is_fed_input(self, operation: Operation) -> bool:
        """Whether an operation is fed the network's input, or one of several, as it is up to its shape."""
        return any(_same_numbers(tensor, operation.inputs) for tensor in tensors_in(self.inputs))

    def fed_by_input(self) -> Operation | None:
        """The dense layer whose input is the network's input, flattened."""
        inputs = self.inputs
        if not isinstance(inputs, Tensor):
            return None
        return next((layer for layer in self.layers if same(layer.inputs, inputs.flatten(1))), None)

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


def network_map(observation: Observation) -> NetworkMap:
    """The map by one forward pass of random inputs with the parameters of the first round."""
    knowledge, model, first = observation.knowledge, observation.model, observation.rounds[0]
    if knowledge.input_shape is None or model is None:
        raise NotApplicable("expected the model and its input_shape to look for layers; grant both.")
    tensors = {**first.params, **(first.buffers_before or {})}
    like = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    return map_of(model, tensors, random_inputs(knowledge.input_shape, knowledge.input_types, like))


def map_of(model: nn.Module, tensors: Update, inputs: Inputs) -> NetworkMap:
    """The map by one forward pass of these inputs, at least two samples; `tensors` are parameters and buffers."""
    try:
        operations, outputs = operations_of(model, tensors, inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_in(inputs))
        raise NotApplicable(
            f"expected the model to accept inputs of shape {shapes}, found: {str(error).splitlines()[0]}."
        ) from error
    merged = tuple(_with_added_biases(operations))
    try:
        scores = predictions(outputs)
    except BadInput:  # the loss is of the user's own and makes something else of it
        scores = next(tensors_in(outputs))
    return NetworkMap(inputs=inputs, outputs=scores, operations=merged)


def random_inputs(shape: InputShape, types: InputTypes | None, like: Tensor) -> Inputs:
    """Random samples: fractions from 0 to 1 as precise as `like`, whole numbers 0 or 1, tokens of every network."""
    rng = torch.Generator().manual_seed(0)

    def random(blank: Tensor) -> Tensor:
        return torch.rand(blank.shape, generator=rng).to(blank) if blank.is_floating_point() else _coins(blank, rng)

    return map_tensors(random, blank_inputs(shape, types, SAMPLES, like))


def _coins(blank: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, blank.shape, generator=rng).to(blank)


def _with_added_biases(operations: list[Operation]) -> Iterator[Operation]:
    """The operations, where a product and the vector that is added to it right after are one with a bias."""
    following = iter(operations)
    operation = next(following, None)
    while operation is not None:
        after = next(following, None)
        if after is not None and _adds_bias(operation, after):
            yield replace(operation, bias=after.weight, outputs=after.outputs, end=after.number)
            after = next(following, None)
        else:
            yield operation
        operation = after


def _adds_bias(product: Operation, addition: Operation) -> bool:
    if product.kind is not Kind.DENSE or product.bias is not None or addition.kind is not Kind.ADDED:
        return False
    return not addition.derived and len(addition.shape) == 1 and same(addition.inputs, product.outputs)


def _same_numbers(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever order and shape."""
    if first.numel() != second.numel() or first.dtype != second.dtype:
        return False
    return first.is_meta or torch.equal(first.flatten().sort().values, second.flatten().sort().values)
