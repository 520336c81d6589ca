"""A network cut at an operation: what comes before it, and what follows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.inputs import map_tensors
from fedprism.network.network_map import NetworkMap
from fedprism.network.operations import Operation, run_with
from fedprism.network.torch_calls import tensors_in
from fedprism.types import Inputs, Observation, Round, Update


class _Reached(Exception):
    """The operation was reached: what lies behind it need not be computed."""


def features_before(observation: Observation, round_: Round, operation: Operation) -> Callable[[Inputs], Tensor]:
    """The function from inputs (samples, *input_shape) to what the operation is fed."""
    model = _frozen(observation)

    def features(inputs: Inputs) -> Tensor:
        caught: list[Tensor] = []

        def catch(fed: Tensor, _: Callable[[], Any]) -> None:
            caught.append(fed)
            raise _Reached

        with suppress(_Reached):
            run_with(model, round_.sent, inputs, operation.number, catch)
        return caught[0]

    return features


def network_behind(
    observation: Observation, round_: Round, operation: Operation, network: NetworkMap, params: Update
) -> Callable[[Tensor], Tensor]:
    """The function from the operation's outputs (samples, ...) to the network's, in double precision.

    A plain stack of dense layers is computed as such; any other network runs as a whole, on one random input, with the
    operation's outputs put in place.
    """
    stack = network.stack_from(operation)
    doubled = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in {**round_.sent, **params}.items()
    }
    if stack is not None:
        layers, activations = stack

        def through_stack(outputs: Tensor) -> Tensor:
            for following, activation in zip(layers[1:], activations, strict=True):
                bias = doubled[following.bias] if following.bias is not None else 0
                outputs = activation.function(outputs) @ following.rows(doubled).T + bias
            return outputs

        return through_stack

    model = _frozen(observation).double()
    sample = one_sample(network.inputs, torch.float64)

    def through_model(outputs: Tensor) -> Tensor:
        result = run_with(model, doubled, sample, operation.end, lambda *_: outputs)
        return next(tensors_in(result))

    return through_model


def one_sample(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The first of several samples, its fractional numbers in another precision."""

    return map_tensors(lambda tensor: tensor[:1].to(dtype) if tensor.is_floating_point() else tensor[:1], inputs)


def _frozen(observation: Observation) -> nn.Module:
    """A copy of the model in evaluation mode."""
    assert observation.model is not None
    return copy.deepcopy(observation.model).eval().requires_grad_(False)
