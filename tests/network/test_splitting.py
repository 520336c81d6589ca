"""A network cut at a dense layer: both parts against the whole, whatever the network is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.network.operations import Operation
from fedprism.network.splitting import features_before, network_behind
from fedprism.types import Observation, Update, detached


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(48, 20), nn.Linear(20, 16, bias=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.first(x.flatten(1)))

    def behind(self, outputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(outputs))))


class Residual(Stack):
    """Not a plain stack: what the second layer gets is added to what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(20, 20)
        self.last = nn.Linear(20, 5)

    def behind(self, outputs: Tensor) -> Tensor:
        hidden = torch.relu(outputs)
        return self.last(hidden + torch.relu(self.second(hidden)))


class Normalised(Stack):
    """A batch norm behind the layer, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.norm.running_mean.copy_(torch.linspace(-1, 1, 20))
        self.norm.running_var.copy_(torch.linspace(0.5, 2, 20))

    def behind(self, outputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.norm(outputs)))))


class Convolutional(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.first = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.first(self.features(x)))

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolution(x)).flatten(1)


NETWORKS = [Stack, Residual, Normalised, Convolutional]


def opened(kind: type[Stack]) -> tuple[Stack, Observation, NetworkMap, Operation]:
    """A network in evaluation mode, what an attacker sees of it, and its first dense layer."""
    torch.manual_seed(0)
    model = kind().eval()
    batch = fp.Batch(torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(4))
    observation, _ = fp.simulate(
        fp.Scenario(model=model, clients=[batch], training=False), fp.threats.honest_but_curious, device="cpu"
    )
    network = network_map(observation)
    return model, observation, network, network.layers[0]


def states(model: nn.Module) -> Update:
    return detached(dict(model.state_dict()))


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_follows_is_the_networks_own_function(kind: type[Stack]) -> None:
    model, observation, network, layer = opened(kind)
    behind = network_behind(observation, observation.rounds[0], layer, network, observation.rounds[0].params)
    outputs = torch.randn(7, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(behind(outputs), model.double().behind(outputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", NETWORKS)
def test_its_derivatives_are_the_networks_own(kind: type[Stack]) -> None:
    model, observation, network, layer = opened(kind)
    behind = network_behind(observation, observation.rounds[0], layer, network, observation.rounds[0].params)
    outputs = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model = model.double()
    first, second = (torch.autograd.grad(f(outputs).square().sum(), outputs)[0] for f in (behind, model.behind))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_only_a_plain_stack_is_computed_as_one() -> None:
    for kind, plain in ((Stack, True), (Convolutional, True), (Residual, False), (Normalised, False)):
        _, _, network, layer = opened(kind)
        assert (network.stack_from(layer) is not None) == plain


@pytest.mark.parametrize("kind", NETWORKS)
def test_parameters_other_than_the_sent_ones_can_be_put_in(kind: type[Stack]) -> None:
    model, observation, network, layer = opened(kind)
    seen = observation.rounds[0]
    moved = {name: tensor + 0.1 * seen.update[name] for name, tensor in seen.params.items()}
    behind = network_behind(observation, seen, layer, network, moved)
    model.load_state_dict({**model.state_dict(), **moved})
    outputs = torch.randn(7, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(behind(outputs), model.double().behind(outputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_comes_before_is_what_the_layer_is_fed(kind: type[Stack]) -> None:
    model, observation, _, layer = opened(kind)
    inputs = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found = features_before(observation, observation.rounds[0], layer)(inputs)
    expected = model.features(inputs) if isinstance(model, Convolutional) else inputs.flatten(1)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found.sum(), inputs)
    assert bool(slope.any())


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_observed_model_is_left_alone(kind: type[Stack]) -> None:
    _, observation, network, layer = opened(kind)
    model = observation.model
    assert model is not None
    before, training = states(copy.deepcopy(model)), model.training
    seen = observation.rounds[0]
    network_behind(observation, seen, layer, network, seen.params)(torch.zeros(2, 20, dtype=torch.float64))
    features_before(observation, seen, layer)(torch.zeros(2, 3, 4, 4))
    after = states(model)
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert model.training == training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
