"""Which dense layers a network has and how they hang together, found by watching a forward pass.

Numbers are compared instead of code being read: it works for any `nn.Module`, with activations as modules or functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.errors import NotApplicable
from fedprism.types import Observation


class DenseLayer(NamedTuple):
    weight: str
    """Name of the weight parameter."""
    bias: str | None
    inputs: Tensor
    outputs: Tensor


class Trace(NamedTuple):
    inputs: Tensor
    outputs: Tensor
    layers: tuple[DenseLayer, ...]
    """In the order of execution."""

    def fed_by_input(self) -> DenseLayer | None:
        """The dense layer whose input is the network's input, flattened."""
        return next((layer for layer in self.layers if _same(layer.inputs, self.inputs.flatten(1))), None)

    def output_layer(self) -> DenseLayer | None:
        """The dense layer whose output is the network's output."""
        return next((layer for layer in self.layers if _same(layer.outputs, self.outputs)), None)

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
            found = next((a for a in ACTIVATIONS if _same(a.function(before.outputs), after.inputs)), None)
            if found is None:
                return None
            between.append(found)
        return layers, tuple(between)


class Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, float], Tensor]
    """The derivative, as a function of the activation's *output*, of which what is below a share of the largest of its
    sample was zero."""


ACTIVATIONS = (
    Activation(lambda x: x, lambda z, _: torch.ones_like(z)),
    Activation(torch.relu, lambda z, tiny: (z > tiny * z.abs().amax(1, keepdim=True)).to(z)),
    Activation(torch.sigmoid, lambda z, _: z * (1 - z)),
    Activation(torch.tanh, lambda z, _: 1 - z.square()),
)


def trace(observation: Observation) -> Trace:
    """Watch the network on random inputs, with the parameters of the first round."""
    shape, model, seen = observation.knowledge.input_shape, observation.model, observation.rounds[0]
    if shape is None or model is None:
        raise NotApplicable("expected the model and its input_shape to look for dense layers; grant both.")
    model = copy.deepcopy(model).eval()
    like = next(iter(seen.params.values()))
    inputs = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(like)
    layers: list[DenseLayer] = []
    names = {module: name for name, module in model.named_modules()}

    def watch(module: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> None:
        prefix = f"{names[module]}." if names[module] else ""
        bias = f"{prefix}bias" if getattr(module, "bias", None) is not None else None
        # Copies, because an activation may work in place.
        layers.append(DenseLayer(f"{prefix}weight", bias, args[0].detach().clone(), outputs.detach().clone()))

    hooks = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        with torch.no_grad():
            outputs = functional_call(model, {**seen.params, **(seen.buffers_before or {})}, (inputs,))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise NotApplicable(f"expected the model to accept inputs of shape {shape}, found: {reason}.") from error
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(inputs, outputs, tuple(layers))


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)
