"""Models that normalise their input themselves: what stands before the first dense layer is found and undone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from dense_clients import Products
from fedprism.errors import BadInput
from fedprism.network.entrance import Entrance, entrance_of
from fedprism.network.network_map import network_map
from fedprism.solvers import ExactStatus, unmix

SHAPE = (3, 16, 16)
FEATURES = 3 * 16 * 16
PARTY = fp.attacks.cocktail_party()


class Normalize(nn.Module):
    """The third channel is turned round as well: any slope but zero can be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.25, -0.3]).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = (x - self.mean) / self.std
        return scaled


def network(*first: nn.Module, features: int = FEATURES) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(features, 96), nn.ReLU(), nn.Linear(96, 10))


@pytest.fixture(scope="module")
def batch() -> fp.Batch:
    return fp.data.load("photos", size=16).draw(8, torch.Generator().manual_seed(0))


def seen(model: nn.Module, batch: fp.Batch, **options: object) -> tuple[fp.Observation, fp.Truth]:
    scenario = fp.Scenario(model=model, clients=[batch], **options)  # type: ignore[arg-type]
    return fp.simulate(scenario, fp.threats.honest_but_curious, device="cpu")


def entrance(observation: fp.Observation) -> Entrance | None:
    return entrance_of(observation, network_map(observation).layers[0])


def worst(found: fp.Reconstruction, truth: fp.Truth) -> float:
    return min(value or 0.0 for value in fp.score(found, truth, metrics=("psnr",)).values["psnr"])


def test_slope_and_offset_are_those_of_the_module(batch: fp.Batch) -> None:
    found = entrance(seen(network(Normalize()), batch)[0])
    assert found is not None
    module, inputs = Normalize(), batch.inputs
    torch.testing.assert_close(found.slope.view(SHAPE), (1 / module.std).expand(SHAPE))
    torch.testing.assert_close(found.inputs(module(inputs).flatten(1), scaled=True), inputs.flatten(1))
    low, high = found.box(torch.zeros(1, FEATURES), torch.ones(1, FEATURES))
    fed = module(inputs).flatten(1)
    assert bool(((low - 1e-6 <= fed) & (fed <= high + 1e-6)).all())


@pytest.mark.parametrize(
    "first",
    [nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.LayerNorm(SHAPE), nn.Tanh(), nn.Dropout(0.0), nn.AvgPool2d(3, 1, 1)],
    ids=lambda module: type(module).__name__,
)
def test_nothing_else_is_taken_for_such_a_map(batch: fp.Batch, first: nn.Module) -> None:
    assert (entrance(seen(network(first), batch)[0]) is not None) == isinstance(first, nn.Dropout)


def test_images_come_out_exactly_before_the_normalisation(batch: fp.Batch) -> None:
    observation, truth = seen(network(Normalize()), batch)
    found = fp.run(PARTY, observation, device="cpu")
    assert found.status == ExactStatus.EXACT
    assert found.features is None
    assert worst(found, truth) > 80


def test_without_scales_channels_still_get_their_contrast(batch: fp.Batch) -> None:
    observation, truth = seen(network(Normalize()), batch)
    found = fp.run(fp.attacks.CocktailParty(bias_scale=False), observation, device="cpu")
    assert found.ambiguity == {"order", "sign", "scale"}
    assert fp.score(found, truth, metrics=("psnr",)).mean("psnr") > 14


@pytest.mark.parametrize("products", [False, True])
def test_batch_normalisation_in_evaluation_mode(batch: fp.Batch, products: bool) -> None:
    layer = nn.BatchNorm2d(3)
    layer.running_mean, layer.running_var = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.05, 0.06, 0.07])
    model = Products(FEATURES, 96, 10, before=layer) if products else network(layer)
    observation, truth = seen(model.eval(), batch, training=False)
    found = fp.run(PARTY, observation, device="cpu")
    assert worst(found, truth) > 80
    # Which mode the client was in, an attacker does not know.
    assert found.status.startswith("of what the layer was fed")
    assert not found.diagnostics["exact"]


def test_batch_normalisation_by_the_batch_itself_is_a_guess(batch: fp.Batch) -> None:
    observation, truth = seen(network(nn.BatchNorm2d(3)), batch)
    found = fp.run(PARTY, observation, device="cpu")
    assert found.status.startswith(f"of what the layer was fed: {ExactStatus.EXACT}")
    assert not found.diagnostics["exact"]
    assert worst(found, truth) < 40


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_of_no_samples_is_refused_in_one_sentence(batch: fp.Batch, size: int) -> None:
    observation, _ = seen(network(), batch)
    wrong = dataclasses.replace(observation, knowledge=dataclasses.replace(observation.knowledge, batch_size=size))
    with pytest.raises(BadInput, match=f"batch_size must be at least 1, not {size}; leave it out"):
        fp.run(PARTY, wrong, device="cpu")
    with pytest.raises(ValueError, match="components must be at least 1"):
        unmix(torch.ones(4, 5), components=size)
