"""The operations of real layers, whoever calls them: what uses which parameter, fed with what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.network.operations import Operation, operations_of, run_with
from fedprism.network.torch_calls import Kind
from fedprism.types import Inputs, Update

TOKENS, WIDTH, LENGTH = 30, 8, 7


def tensors_of(model: nn.Module) -> Update:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def watched(model: nn.Module, inputs: Inputs) -> list[Operation]:
    return list(operations_of(model, tensors_of(model), inputs)[0])


def words() -> Tensor:
    return torch.randint(0, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Text(nn.Module):
    """Tokens with positions by number, attention, recurrence, and an output layer that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)
        self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.output(self.recurrent(self.attention(embedded))[0])


class ByHand(nn.Module):
    """Parameters without layers: a product and a vector, a part of a table, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.table, self.first = nn.Parameter(torch.randn(9, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.relu(inputs @ self.weight + self.shift)
        joined = torch.cat([self.first.expand(len(inputs), -1, -1), places], 1)
        return joined + self.table[: joined.shape[1]]


def test_layers_of_a_text_network_are_told_apart() -> None:
    kinds = [(operation.kind, operation.weight) for operation in watched(Text(), words())]
    assert kinds[:3] == [
        (Kind.EMBEDDING, "token.weight"),
        (Kind.ADDED, "position.weight"),
        (Kind.ATTENTION, "attention.self_attn.in_proj_weight"),
    ]
    assert kinds[-2:] == [(Kind.RECURRENT, "recurrent.weight_ih_l0"), (Kind.DENSE, "token.weight")]


def test_parameters_without_layers_are_told_apart() -> None:
    product, token, table = watched(ByHand(), torch.rand(2, 4, 5))
    assert (product.kind, product.weight, product.transposed) == (Kind.DENSE, "weight", True)
    assert (product.bias, product.number, product.end) == ("shift", 1, 2)
    assert (token.kind, token.weight) == (Kind.JOINED, "first")
    assert (table.kind, table.weight, table.derived) == (Kind.ADDED, "table", True)


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 4, 2, 2), nn.Conv2d(3, 4, 2, 2), nn.Conv3d(3, 4, 2, 2)])
def test_convolutions_come_with_their_settings_and_places(layer: nn.Module) -> None:
    dimensions = layer.weight.dim() - 2
    (operation,) = watched(layer, torch.rand(2, 3, *[6] * dimensions))
    assert operation.kind is Kind.CONVOLUTION
    assert operation.places == 3**dimensions
    assert tuple(operation.settings["stride"]) == (2,) * dimensions


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])
def test_norms_have_a_scale_and_a_shift(norm: nn.Module) -> None:
    (operation,) = watched(norm, torch.rand(2, 4))
    assert (operation.kind, operation.weight, operation.bias) == (Kind.NORM, "weight", "bias")


def test_a_part_of_a_parameter_is_taken_out_of_an_update() -> None:
    model, tokens = Text(), words()
    added = watched(model, tokens)[1]
    update = {name: torch.randn(tensor.shape) for name, tensor in model.named_parameters()}
    assert torch.equal(added.part(update), update["position.weight"][:LENGTH])


def test_rows_of_a_dense_layer_combine_what_it_was_fed() -> None:
    model = ByHand()
    inputs = torch.rand(2, 4, 5)
    product = watched(model, inputs)[0]
    gradients = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()), allow_unused=True)
    update = {name: g for (name, _), g in zip(model.named_parameters(), gradients, strict=True) if g is not None}
    rows, fed = product.rows(update), product.inputs.flatten(0, 1)
    inside = torch.linalg.lstsq(fed.T, rows.T).solution
    assert torch.allclose(fed.T @ inside, rows.T, atol=1e-3)


def test_an_operation_can_be_put_in_the_place_of_another() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    fed, tensors = [], tensors_of(model)

    def twice(inputs: Tensor, usual: object) -> Tensor:
        fed.append(inputs)
        return 2 * F.linear(inputs, tensors["2.weight"], tensors["2.bias"])

    inputs = torch.rand(5, 3)
    assert torch.allclose(run_with(model, tensors, inputs, 2, twice), 2 * model(inputs))
    assert torch.equal(fed[0], model[:2](inputs))


def test_watching_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched(model, torch.rand(4, 3))
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_attention_with_a_matrix_for_each_of_its_inputs_is_fed_by_that_of_the_queries() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=6, batch_first=True)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.attention(first, second, second)[0]

    (operation,) = watched(Cross(), (torch.rand(2, 4, WIDTH), torch.rand(2, 5, 6)))
    assert (operation.kind, operation.weight) == (Kind.ATTENTION, "attention.q_proj_weight")
    assert {"attention.k_proj_weight", "attention.v_proj_weight"} <= set(operation.further)


def test_every_parameter_of_a_computed_weight_is_found() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    (operation,) = watched(layer, torch.rand(2, 4))
    assert operation.derived
    assert {operation.weight, operation.bias, *operation.further} == {name for name, _ in layer.named_parameters()}


def test_bags_and_frozen_layers_are_found() -> None:
    model = nn.Sequential(nn.EmbeddingBag(TOKENS, WIDTH), nn.Linear(WIDTH, 3).requires_grad_(False))
    bag, dense = watched(model, words())
    assert (bag.kind, bag.weight) == (Kind.EMBEDDING, "0.weight")
    assert (dense.kind, dense.weight, dense.bias) == (Kind.DENSE, "1.weight", "1.bias")
