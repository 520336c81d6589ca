"""A network cut at a dense layer: what comes before it, and what follows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.network.network_map import DenseLayer, NetworkMap
from fedprism.types import Observation, Round, Update


class _Reached(Exception):
    """The layer was reached: what lies behind it need not be computed."""


def features_before(observation: Observation, round_: Round, layer: DenseLayer) -> Callable[[Tensor], Tensor]:
    """The function from inputs (samples, *input_shape) to the layer's inputs (samples, features)."""
    model, module = _frozen(observation, layer)
    tensors = {**round_.params, **(round_.buffers_before or {})}

    def features(inputs: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            raise _Reached

        hook = module.register_forward_pre_hook(catch)
        try:
            functional_call(model, tensors, (inputs,))
        except _Reached:
            pass
        finally:
            hook.remove()
        return caught[0]

    return features


def network_behind(
    observation: Observation, round_: Round, layer: DenseLayer, network: NetworkMap, params: Update
) -> Callable[[Tensor], Tensor]:
    """The function from the layer's outputs (samples, units) to the network's, in double precision.

    A plain stack of dense layers is computed as such; any other network runs as a whole, on one blank input, with the
    layer's outputs put in place.
    """
    stack = network.stack_from(layer)
    doubled = {name: tensor.double() for name, tensor in {**params, **(round_.buffers_before or {})}.items()}
    if stack is not None:
        layers, activations = stack

        def through_stack(outputs: Tensor) -> Tensor:
            for following, activation in zip(layers[1:], activations, strict=True):
                bias = doubled[following.bias] if following.bias is not None else 0
                outputs = activation.function(outputs) @ doubled[following.weight].T + bias
            return outputs

        return through_stack

    model, module = _frozen(observation, layer)
    model = model.double()
    blank = torch.zeros_like(network.inputs[:1], dtype=torch.float64)

    def through_model(outputs: Tensor) -> Tensor:
        hook = module.register_forward_hook(lambda *_: outputs)
        try:
            result: Tensor = functional_call(model, doubled, (blank,))
        finally:
            hook.remove()
        return result

    return through_model


def _frozen(observation: Observation, layer: DenseLayer) -> tuple[nn.Module, nn.Module]:
    """A copy of the model in evaluation mode, and its module that is the layer."""
    model = copy.deepcopy(observation.model)
    assert model is not None
    model = model.eval().requires_grad_(False)
    return model, model.get_submodule(layer.weight.rpartition(".")[0])
