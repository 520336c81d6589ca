"""Which dense layers a network has and how they are connected.

Numbers are compared instead of code being read: it works for any `nn.Module`, with activations as modules or functions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedprism.errors import NotApplicable
from fedprism.network.forward_pass import Operation, same, watch
from fedprism.types import Observation


class DenseLayer(NamedTuple):
    """`weight` and `bias` are names of parameters."""

    weight: str
    bias: str | None
    inputs: Tensor
    outputs: Tensor


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


class NetworkMap(NamedTuple):
    """`layers` are in the order of execution."""

    inputs: Tensor
    outputs: Tensor
    layers: tuple[DenseLayer, ...]

    def fed_by_input(self) -> DenseLayer | None:
        """The dense layer whose input is the network's input, flattened."""
        return next((layer for layer in self.layers if same(layer.inputs, self.inputs.flatten(1))), None)

    def output_layer(self) -> DenseLayer | None:
        """The dense layer whose output is the network's output."""
        return next((layer for layer in self.layers if same(layer.outputs, self.outputs)), None)

    def stack(self) -> tuple[tuple[DenseLayer, ...], tuple[Activation, ...]] | None:
        """The layers and the activations between them, where the network is a plain stack of dense layers."""
        return self.stack_from(self.layers[0]) if self.layers and self.fed_by_input() is self.layers[0] else None

    def stack_from(self, first: DenseLayer) -> tuple[tuple[DenseLayer, ...], tuple[Activation, ...]] | None:
        """The layers from `first` on and the activations between them, where nothing else is there."""
        layers = self.layers[[layer.weight for layer in self.layers].index(first.weight) :]
        if self.output_layer() is not layers[-1]:
            return None
        between = []
        for before, after in pairwise(layers):
            activation = next((a for a in ACTIVATIONS if same(a.function(before.outputs), after.inputs)), None)
            if activation is None:
                return None
            between.append(activation)
        return layers, tuple(between)


def network_map(observation: Observation) -> NetworkMap:
    """Find every dense layer from one forward pass of random inputs with the parameters of the first round."""
    shape, model, first = observation.knowledge.input_shape, observation.model, observation.rounds[0]
    if shape is None or model is None:
        raise NotApplicable("expected the model and its input_shape to look for dense layers; grant both.")
    inputs = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(next(iter(first.params.values())))
    tensors = {**first.params, **(first.buffers_before or {})}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    try:
        operations, outputs = watch(model, tensors, inputs, linear)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise NotApplicable(f"expected the model to accept inputs of shape {shape}, found: {reason}.") from error
    return NetworkMap(inputs, outputs, tuple(map(_dense_layer, operations)))


def _dense_layer(operation: Operation) -> DenseLayer:
    prefix = f"{operation.name}." if operation.name else ""
    bias = f"{prefix}bias" if operation.module.bias is not None else None
    return DenseLayer(f"{prefix}weight", bias, operation.inputs, operation.outputs)
