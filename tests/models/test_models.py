"""The networks have the published sizes, build reproducibly, and refuse hostile descriptions in one sentence."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from fedprism.errors import BadInput
from fedprism.models import MODELS, ModelSpec, build, spec_of, uniform_

SMALL: dict[str, dict[str, Any]] = {
    "dense": {"input_shape": (1, 4, 4), "classes": 3},
    "fc2": {"input_shape": [3, 4, 4], "hidden": 5, "classes": 3},
    "lenet": {"input_shape": [3, 9, 6], "classes": 3, "width": 2},
    "lenet5": {"input_shape": [3, 16, 19], "classes": 3},
    "resnet18": {"classes": 3},
    "vgg16": {"classes": 3},
}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kwargs", "count"),
    [
        ("dense", {"input_shape": [3, 32, 32], "classes": 10}, 3072 * 10 + 10),
        ("fc2", {"input_shape": [3, 32, 32]}, 3072 * 256 + 256 + 256 * 10 + 10),
        ("lenet", {"input_shape": [3, 32, 32]}, 3 * 12 * 25 + 2 * 12 * 12 * 25 + 3 * 12 + 768 * 10 + 10),
        ("lenet", {"input_shape": [1, 28, 28]}, 12 * 25 + 2 * 12 * 12 * 25 + 3 * 12 + 588 * 10 + 10),
        ("lenet5", {"input_shape": [3, 32, 32]}, 456 + 2416 + 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"width": 16}, 701_466),
        ("vgg16", {}, 138_357_544),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, kwargs: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = build(name, **kwargs)
    assert parameters(model) == count
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_row_builds_and_says_how(name: str) -> None:
    with torch.device("meta"):
        model = build(name, **SMALL[name])
    spec = spec_of(copy.deepcopy(model))
    assert spec is not None
    assert spec.name == name
    with torch.device("meta"):
        again = build(spec.name, **json.loads(json.dumps(spec.kwargs)))
    assert spec_of(again) == spec == model.fedprism_spec
    assert {key: tensor.shape for key, tensor in again.state_dict().items()} == {
        key: tensor.shape for key, tensor in model.state_dict().items()
    }


def test_spec_is_complete_and_other_models_have_none() -> None:
    model = build("fc2", input_shape=(4,), hidden=2)
    assert spec_of(model) == ModelSpec("fc2", {"input_shape": [4], "hidden": 2, "classes": 10})
    assert spec_of(nn.Linear(1, 1)) is None


@pytest.mark.parametrize("downsample", ["stride", "pool"])
@pytest.mark.parametrize("activation", ["sigmoid", "relu", "tanh"])
@pytest.mark.parametrize("size", [(28, 28), (32, 32), (9, 6), (4, 5)])
def test_lenet_fits_any_input(size: tuple[int, int], activation: str, downsample: str) -> None:
    model = build("lenet", input_shape=(2, *size), classes=3, width=4, activation=activation, downsample=downsample)
    assert model(torch.zeros(2, 2, *size)).shape == (2, 3)


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (17, 33)])
def test_lenet5_fits_any_input_of_16_pixels(size: tuple[int, int]) -> None:
    model = build("lenet5", input_shape=(1, *size), classes=3)
    assert model(torch.zeros(2, 1, *size)).shape == (2, 3)


def test_resnet18_is_the_cifar_variant() -> None:
    model = build("resnet18", classes=7, input_channels=1).eval()
    shapes = {}
    for name in ("conv1", "layer1", "layer4"):
        getattr(model, name).register_forward_hook(lambda _, __, out, name=name: shapes.update({name: out.shape[1:]}))
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 7)
    assert shapes == {"conv1": (64, 32, 32), "layer1": (64, 32, 32), "layer4": (512, 4, 4)}


def test_vgg16_sets_dropout() -> None:
    with torch.device("meta"):
        model = build("vgg16", dropout=0.25)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25, 0.25]


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = (build("fc2", input_shape=[4], seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    torch.manual_seed(5)
    assert torch.equal(build("dense", input_shape=[4], classes=3)[1].weight, plain[1].weight)


def test_uniform_draws_every_parameter_from_its_seed() -> None:
    model = build("fc2", input_shape=[500], seed=0)
    assert uniform_(model, seed=3) is model
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert -0.5 <= values.min() < -0.499
    assert 0.499 < values.max() <= 0.5
    assert abs(values.var().item() - 1 / 12) < 1e-3
    weight = model[1].weight.clone()
    assert torch.equal(uniform_(model, seed=3)[1].weight, weight)
    assert not torch.equal(uniform_(model, seed=4)[1].weight, weight)
    with pytest.raises(BadInput, match="bounds must be finite and increase"):
        uniform_(model, 1.0, 1.0)


@pytest.mark.parametrize(("wrong", "hint"), [("lenett", "lenet"), ("resnet", "resnet18"), (None, "vgg16"), ([], "fc2")])
def test_unknown_name_is_refused_with_the_nearest(wrong: Any, hint: str) -> None:
    with pytest.raises(BadInput, match=hint):
        build(wrong)


@pytest.mark.parametrize(
    ("name", "kwargs", "names"),
    [
        ("fc2", {"input_shape": [4], "hiden": 3}, "hiden"),
        ("fc2", {"input_shape": [4], "name": "dense"}, "name"),
        ("dense", {"input_shape": [4]}, "classes"),
        ("fc2", {}, "input_shape"),
        ("fc2", {"input_shape": "abc"}, "input_shape"),
        ("fc2", {"input_shape": 4}, "input_shape"),
        ("fc2", {"input_shape": []}, "input_shape"),
        ("fc2", {"input_shape": [1] * 5}, "input_shape"),
        ("fc2", {"input_shape": [True]}, "input_shape"),
        ("fc2", {"input_shape": [0]}, "input_shape"),
        ("fc2", {"input_shape": [-1, -1]}, "input_shape"),
        ("fc2", {"input_shape": [1.0]}, "input_shape"),
        ("fc2", {"input_shape": [65537]}, "input_shape"),
        ("fc2", {"input_shape": [10**5000]}, "input_shape"),
        ("fc2", {"input_shape": [65536, 65536]}, "input_shape"),
        ("fc2", {"input_shape": {"0": 4}}, "input_shape"),
        ("fc2", {"input_shape": [65536, 4096], "hidden": 2**20}, "parameters"),
        ("fc2", {"input_shape": [4], "hidden": True}, "hidden"),
        ("fc2", {"input_shape": [4], "hidden": "3"}, "hidden"),
        ("fc2", {"input_shape": [4], "hidden": None}, "hidden"),
        ("fc2", {"input_shape": [4], "hidden": 2**20 + 1}, "hidden"),
        ("fc2", {"input_shape": [4], "classes": float("nan")}, "classes"),
        ("dense", {"input_shape": [4], "classes": 0}, "classes"),
        ("lenet", {"input_shape": [4, 4]}, "input_shape"),
        ("lenet", {"input_shape": [1, 3, 8], "downsample": "pool"}, "4x4"),
        ("lenet", {"input_shape": [1, 8, 8], "activation": "gelu"}, "activation"),
        ("lenet", {"input_shape": [1, 8, 8], "activation": ["relu"]}, "activation"),
        ("lenet", {"input_shape": [1, 8, 8], "downsample": None}, "downsample"),
        ("lenet", {"input_shape": [1, 8, 8], "width": 2**20}, "parameters"),
        ("lenet5", {"input_shape": [1, 15, 16]}, "16x16"),
        ("lenet5", {"input_shape": [1, 16, 16], "classes": 0}, "classes"),
        ("resnet18", {"input_channels": 0}, "input_channels"),
        ("resnet18", {"width": 0}, "width"),
        ("vgg16", {"dropout": float("nan")}, "dropout"),
        ("vgg16", {"dropout": 1.0}, "dropout"),
        ("vgg16", {"dropout": "0.5"}, "dropout"),
        ("fc2", {"input_shape": [4], "seed": True}, "seed"),
        ("fc2", {"input_shape": [4], "seed": -1}, "seed"),
    ],
)
def test_hostile_keywords_are_refused_by_name(name: str, kwargs: dict[str, Any], names: str) -> None:
    with pytest.raises(BadInput, match=names) as refusal:
        build(name, **kwargs)
    message = str(refusal.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 400
