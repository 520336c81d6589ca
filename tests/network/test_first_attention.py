"""What the first attention is fed: whichever norm, projection and order of dimensions a network uses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedprism.network.first_attention import BehindFirstAttention
from fedprism.network.operations import operations_of
from fedprism.network.patches import patch_layer
from fedprism.types import Knowledge, Observation, Round
from patch_models import small_vit

WIDTH = 24


class Separate(nn.Module):
    """Positions of its own, a norm to choose, three dense projections, plain attention."""

    def __init__(self, norm: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.norm, self.scale = nn.Conv2d(3, WIDTH, 8, stride=8), norm, scale
        self.register_buffer("places", torch.rand(16, WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.scale * self.embed(images).flatten(2).transpose(1, 2) + self.places
        normal = self.norm(tokens)
        weights = torch.softmax(self.query(normal) @ self.key(normal).transpose(1, 2), dim=-1)
        outputs: Tensor = self.head((tokens + weights @ self.value(normal)).mean(1))
        return outputs


def observed(model: nn.Module) -> Observation:
    round = Round(params=dict(model.named_parameters()), update={}, buffers_before=dict(model.named_buffers()) or None)
    return Observation(model=model, rounds=(round,), knowledge=Knowledge(input_shape=(3, 32, 32)))


@pytest.mark.parametrize(
    ("norm", "centred"), [(nn.LayerNorm(WIDTH), True), (nn.RMSNorm(WIDTH), False), (nn.Identity(), False)]
)
def test_norm_and_projections_are_told(norm: nn.Module, centred: bool) -> None:
    model = Separate(norm)
    layer = patch_layer(observed(model))
    assert layer is not None
    assert layer.position is None
    attention = layer.attention
    assert attention is not None
    assert {projection.weight for projection in attention.projections} == {"query.weight", "key.weight", "value.weight"}
    assert attention.centred == centred
    assert (attention.gain is None) == isinstance(norm, nn.Identity)
    assert attention.tokens == 16
    assert torch.allclose(attention.fixed, (model.places + model.embed.bias).double(), atol=1e-5)  # type: ignore[operator]


def test_the_class_token_is_counted_and_trained_norms_are_read() -> None:
    model = small_vit(positions="sines")
    norm = model.blocks[0].norm1
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    layer = patch_layer(observed(model))
    assert layer is not None
    assert layer.attention is not None
    assert layer.attention.tokens == 17
    assert torch.equal(layer.attention.shift, norm.bias.double())  # type: ignore[arg-type, operator, union-attr]
    assert [projection.weight for projection in layer.attention.projections] == ["blocks.0.self_attn.in_proj_weight"]


def test_tokens_that_are_no_sum_of_embedding_and_position_are_not_followed() -> None:
    layer = patch_layer(observed(Separate(nn.LayerNorm(WIDTH), scale=0.5)))
    assert layer is not None
    assert layer.attention is None


def test_nothing_behind_the_first_attention_is_looked_at() -> None:
    model = small_vit(depth=3)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    operations, outputs = operations_of(model, tensors, torch.rand(1, 3, 32, 32), until=BehindFirstAttention())
    assert outputs is None
    names = {operation.weight for operation in operations}
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert not any(name.startswith(("blocks.1", "blocks.2")) for name in names)
