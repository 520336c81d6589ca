"""The papers' target networks by name: `build("fc2", input_shape=(3, 32, 32), hidden=256, classes=10)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedprism.checks import arguments, row, shown, whole
from fedprism.errors import BadInput
from fedprism.models.dense import dense, fc2
from fedprism.models.lenet import lenet, lenet5
from fedprism.models.resnet import resnet18
from fedprism.models.vgg import vgg16

__all__ = [
    "MODELS",
    "ModelSpec",
    "build",
    "dense",
    "fc2",
    "lenet",
    "lenet5",
    "resnet18",
    "spec_of",
    "uniform_",
    "vgg16",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "dense": dense,
    "fc2": fc2,
    "lenet": lenet,
    "lenet5": lenet5,
    "resnet18": resnet18,
    "vgg16": vgg16,
}

MOST_PARAMETERS = 2**32
"""16 GiB of float32: sizes may be sane each on its own and their product still more than any machine should hold."""
MOST_SEED = 2**63 - 1
"""The largest signed number of 64 bits."""


@dataclass(frozen=True)
class ModelSpec:
    """How a model was built: its row in MODELS and every keyword, as JSON can hold them."""

    name: str
    kwargs: Mapping[str, Any]


def build(name: str, /, *, seed: int | None = None, **kwargs: Any) -> nn.Module:
    """The model `name` with the keywords of its function in MODELS; `spec_of` tells how it was built.

    With a `seed` the initial weights depend on it alone. Under `torch.device("meta")` nothing is allocated.
    """
    make = row(MODELS, name, "model")
    options = arguments(make, kwargs, f"the model {name}")
    with torch.device("meta"):
        count = sum(math.prod(parameter.shape) for parameter in make(**options).parameters())
    if count > MOST_PARAMETERS:
        raise BadInput(f"{name} would have {count} parameters; the limit is {MOST_PARAMETERS}. Use smaller sizes.")
    model = make(**options) if seed is None else _seeded(lambda: make(**options), whole(seed, "seed", MOST_SEED, 0))
    spec = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    # Through the instance dictionary, because nn.Module declares attributes to be tensors or modules.
    vars(model)["fedprism_spec"] = ModelSpec(name, spec)
    return model


def spec_of(model: nn.Module) -> ModelSpec | None:
    """How `build` made this model, or None for a model of another origin."""
    spec = getattr(model, "fedprism_spec", None)
    return spec if isinstance(spec, ModelSpec) else None


def uniform_(model: nn.Module, low: float = -0.5, high: float = 0.5, *, seed: int = 0) -> nn.Module:
    """Draw every parameter from U(low, high) in place, as DLG and iDLG do, and return the model."""
    if not -math.inf < low < high < math.inf:
        raise BadInput(f"bounds must be finite and increase, not {shown(low)} and {shown(high)}.")
    # On the CPU, so that a seed gives the same weights on every device.
    rng = torch.Generator("cpu").manual_seed(whole(seed, "seed", MOST_SEED, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape, device="cpu").uniform_(low, high, generator=rng))
    return model


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a model on the CPU from a seed, then bring it to the device it was wanted on."""
    device = torch.empty(0).device
    if device.type == "meta":
        return make()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed, which would reseed the GPUs as well.
        torch.default_generator.manual_seed(seed)
        return make().to(device)
