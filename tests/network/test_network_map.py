"""The map of a network: what feeds an operation, and plain stacks of dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedprism.network.network_map import NetworkMap, map_of
from fedprism.types import Inputs, Observation, Round


def mapped(model: nn.Module, inputs: Inputs) -> NetworkMap:
    round = Round(params=dict(model.named_parameters()), update={}, buffers_before=dict(model.named_buffers()))
    return map_of(Observation(model=model, rounds=(round,)), inputs)


class Table(nn.Module):
    """Numbers beside a category that is looked up, and a bias added by a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.shift = nn.Embedding(5, 3), nn.Parameter(torch.randn(4))
        self.weight, self.output = nn.Parameter(torch.randn(4, 5)), nn.Linear(4, 2)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        fed = torch.cat([numbers, self.category(category)], 1)
        return self.output(torch.tanh(fed @ self.weight.T + self.shift))


def table() -> tuple[Table, tuple[Tensor, Tensor]]:
    return Table(), (torch.rand(2, 2), torch.tensor([0, 3]))


def test_a_bias_that_is_added_by_a_call_of_its_own_belongs_to_its_layer() -> None:
    hidden, output = mapped(*table()).layers
    assert (hidden.weight, hidden.bias, hidden.number, hidden.end) == ("weight", "shift", 2, 3)
    assert (output.weight, output.bias) == ("output.weight", "output.bias")


def test_what_feeds_an_operation_is_known_through_a_change_of_shape() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Flatten(), nn.Linear(16, 5))
    network = mapped(model, torch.rand(2, 3, 4, 4))
    convolution, dense = network.operations
    assert network.feeder(dense) is convolution
    assert network.feeder(convolution) is None


def test_a_plain_stack_of_dense_layers_comes_with_its_activations() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    stack = mapped(model, torch.rand(2, 1, 2, 2)).stack()
    assert stack is not None
    layers, (activation,) = stack
    assert [layer.weight for layer in layers] == ["1.weight", "3.weight"]
    assert torch.equal(activation.function(torch.ones(1)), torch.tanh(torch.ones(1)))


def test_a_stack_with_something_else_between_is_no_plain_stack() -> None:
    assert mapped(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), torch.rand(2, 4)).stack() is None
