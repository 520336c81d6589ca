"""What layers are fed at each place: with what is sent back there it must make the gradient of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.network.fed import LayerInput, inputs_of_layers, layer_input
from fedprism.network.network_map import network_map

LAYERS = {
    "plain": (nn.Conv2d(3, 4, 3), (3, 7, 6)),
    "strided": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 7, 6)),
    "dilated": (nn.Conv2d(3, 4, 3, dilation=2, padding=2), (3, 7, 6)),
    "same": (nn.Conv2d(3, 4, (5, 3), padding="same"), (3, 7, 6)),
    "valid": (nn.Conv2d(3, 4, 3, padding="valid"), (3, 7, 6)),
    "reflected": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 7, 6)),
    "series": (nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (3, 11)),
    "dense": (nn.Linear(6, 4), (6,)),
    "tokens": (nn.Linear(6, 4), (5, 6)),
}


class Behind(nn.Module):
    """A layer behind a nonlinearity, twice as much of its output as a network returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * self.layer(torch.tanh(inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_is_the_sum_over_places(name: str) -> None:
    layer, shape = LAYERS[name]
    model = Behind(layer).double()
    inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = dict(model.named_parameters())
    fed_layer = _layer(model, shape)
    (fed,) = inputs_of_layers(model, params, [fed_layer])(inputs)
    outputs = model(inputs)
    sent = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(outputs, params["layer.weight"], sent)
    back = 2 * (sent.movedim(1, -1) if isinstance(layer, nn.Conv1d | nn.Conv2d) else sent)
    expected = back.flatten(0, -2).T @ fed.flatten(0, 1)
    torch.testing.assert_close(gradient.flatten(1), expected)


def test_it_can_be_differentiated_forwards_and_mapped() -> None:
    layer, shape = LAYERS["strided"]
    model = Behind(layer).double()
    function = inputs_of_layers(model, dict(model.named_parameters()), [_layer(model, shape)])
    inputs = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def flat(x: Tensor) -> Tensor:
        return function(x)[0].flatten()

    forwards, backwards = torch.func.jacfwd(flat)(inputs), torch.func.jacrev(flat)(inputs)
    torch.testing.assert_close(forwards, backwards)


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 4, 3)], ids=repr)
def test_layers_that_apply_no_whole_matrix_are_left_out(layer: nn.Module) -> None:
    observation = _observation(Behind(layer), (4, 6, 6))
    assert all(layer_input(operation) is None for operation in network_map(observation).operations)


def _layer(model: nn.Module, shape: tuple[int, ...]) -> LayerInput:
    (operation,) = [o for o in network_map(_observation(model, shape)).operations if o.weight == "layer.weight"]
    fed = layer_input(operation)
    assert fed is not None
    return fed


def _observation(model: nn.Module, shape: tuple[int, ...]) -> fp.Observation:
    params = dict(model.named_parameters())
    round = fp.Round(params=params, update={name: torch.zeros_like(p) for name, p in params.items()})
    return fp.Observation(model=model, rounds=(round,), knowledge=fp.Knowledge(input_shape=shape))
