"""Which layer cuts the input into patches, and which parameter is added where: however the network is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.network.patches import PatchLayer, patch_layer
from fedprism.types import Observation, Round
from patch_models import small_vit


def layer_of(model: nn.Module, shape: tuple[int, ...] = (3, 32, 32)) -> PatchLayer | None:
    round = Round(params=dict(model.named_parameters()), update={}, buffers_before=dict(model.named_buffers()) or None)
    return patch_layer(Observation(model=model, rounds=(round,), knowledge=fp.Knowledge(input_shape=shape)))


@pytest.mark.parametrize("positions", ["all", "patches", "image"])
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("rearranged", [False, True])
def test_patches_and_positions_are_told_by_numbers(positions: str, class_token: bool, rearranged: bool) -> None:
    if rearranged and positions == "image":
        pytest.skip("there is no image behind a dense layer")
    model = small_vit(positions=positions, class_token=class_token, rearranged=rearranged)
    layer = layer_of(model)
    assert layer is not None
    assert (layer.weight, layer.position) == ("embed.weight", "position")
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    weight = model.embed.weight.flatten(1)  # type: ignore[union-attr, operator]
    embedded = layer.fed(image.flatten()) @ weight.T + model.embed.bias
    assert torch.allclose(embedded, model.embedded(torch.zeros_like(image))[0] * 0 + plain(model, image), atol=1e-5)
    assert torch.equal(layer.inputs(layer.fed(image.flatten()).unsqueeze(0), image.flatten())[0], image.flatten())
    assert layer.added is not None
    position = model.position
    assert position is not None
    added = position.movedim(1, -1).flatten(0, -2) if positions == "image" else position[0]
    skipped = len(added) - 16
    assert torch.equal(position.flatten()[layer.added], added[skipped:])


def plain(model: nn.Module, image: Tensor) -> Tensor:
    """The embeddings without a position."""
    assert isinstance(model.position, nn.Parameter)
    with torch.no_grad():
        kept = model.position.clone()
        model.position.zero_()
        embedded: Tensor = model.embedded(image)[0]  # type: ignore[operator]
        model.position.copy_(kept)
    return embedded


@pytest.mark.parametrize(("shape", "patch"), [((2, 64), 8), ((1, 8, 8, 8), 4), ((3, 36, 32), 8)])
def test_sound_volumes_and_borders_that_no_patch_holds(shape: tuple[int, ...], patch: int) -> None:
    layer = layer_of(small_vit(0, shape, patch=patch), shape)
    assert layer is not None
    assert layer.position == "position"
    signal = torch.rand(torch.Size(shape).numel(), dtype=torch.float64)
    level = torch.zeros_like(signal)
    back = layer.inputs(layer.fed(signal).unsqueeze(0), level)[0]
    assert torch.equal(back[back != 0], signal[back != 0])
    assert int((back == 0).sum()) == (4 * 32 * 3 if shape == (3, 36, 32) else 0)


def test_pixels_that_the_network_normalises_itself_are_undone() -> None:
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_vit()
            self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))

        def forward(self, images: Tensor) -> Tensor:
            outputs: Tensor = self.inner((images - self.mean) / 0.2)
            return outputs

    layer = layer_of(Normalising())
    assert layer is not None
    assert bool(((layer.placed.slope - 5.0).abs() < 1e-4).all())
    assert layer.placed.offset[0, 0].item() == pytest.approx(-2.0)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 1024, 10)),
        nn.Sequential(nn.Conv2d(3, 8, 4, stride=2), nn.Flatten(), nn.Linear(8 * 225, 10)),
        nn.Sequential(nn.Conv2d(3, 9, 4, stride=4, groups=3), nn.Flatten(), nn.Linear(9 * 64, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)),
        nn.Sequential(nn.LayerNorm(32), nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(8 * 64, 10)),
    ],
)
def test_what_is_no_layer_of_patches(model: nn.Module) -> None:
    assert layer_of(model) is None


def test_windows_with_gaps_between_are_patches_too() -> None:
    layer = layer_of(nn.Sequential(nn.Conv2d(3, 8, 4, stride=6), nn.Flatten(), nn.Linear(8 * 25, 10)))
    assert layer is not None
    assert layer.placed.entries.shape == (25, 48)


def test_a_position_that_is_added_with_a_factor_is_not_read() -> None:
    class Twice(nn.Module):
        def __init__(self, alpha: float) -> None:
            super().__init__()
            self.embed, self.head, self.alpha = nn.Linear(48, 24), nn.Linear(24, 10), alpha
            self.position = nn.Parameter(torch.zeros(64, 24))

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.embed(images.reshape(len(images), 64, 48)).add(self.position, alpha=self.alpha)
            outputs: Tensor = self.head(tokens.relu().mean(1))
            return outputs

    for alpha, position in ((1.0, "position"), (2.0, None)):
        layer = layer_of(Twice(alpha))
        assert layer is not None
        assert layer.position == position


def test_fixed_positions_and_shared_ones_are_no_parameter_of_the_places() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.kind, self.head = nn.Linear(48, 24), nn.Parameter(torch.rand(24)), nn.Linear(24, 10)

        def forward(self, images: Tensor) -> Tensor:
            outputs: Tensor = self.head((self.embed(images.reshape(len(images), 64, 48)) + self.kind).relu().mean(1))
            return outputs

    for model in (small_vit(positions="sines"), small_vit(positions="none"), Shared()):
        layer = layer_of(model)
        assert layer is not None
        assert layer.position is None
