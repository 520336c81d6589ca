"""What was audited, in words: model, data, and where the weights come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fedprism.audit.materials import Setup

RANDOM = "random weights"
FIXED = "fixed weights from the factory"
PARTLY = "partly random weights"
RECORDED = "recorded weights"
GIVEN = "weights as given"


def system(plan: Mapping[str, Any], weights: str) -> str:
    """The audited system in a sentence; `plan` is the plan as JSON."""
    captures, model, data = (plan.get(key) for key in ("captures", "model", "data"))
    if isinstance(captures, Mapping):
        folders = captures.get("folders")
        count = len(folders) if isinstance(folders, list) else 0
        return f"Recorded updates ({count} capture{'' if count == 1 else 's'})."
    name = (model.get("name") or model.get("factory")) if isinstance(model, Mapping) else None
    keys = ("name", "folder", "npz", "csv", "texts", "factory")
    source = next((data[key] for key in keys if data.get(key)), None) if isinstance(data, Mapping) else None
    return f"{name or 'The given model'}, {weights}, simulated clients holding {source or 'the given data'}."


def weights_of(setup: Setup) -> str:
    """Where the weights come from: updates of a new network and of a trained one leak differently.

    Those of a user's own factory are random if another seed draws others.
    """
    model = setup.plan.model
    if setup.plan.captures is not None or model is None:
        return RECORDED
    if model.weights:
        return f"trained weights ({PurePath(model.weights).name})"
    if model.name:
        return RANDOM
    if model.factory is None:
        return GIVEN
    first, second = (dict(setup.materials().new_network(seed).named_parameters()) for seed in (0, 1))
    # Biases and scales that begin at 0 or 1 are the same for every seed, and say nothing.
    telling = [name for name, tensor in first.items() if bool((tensor != tensor.flatten()[:1]).any())]
    same = sum(name in second and torch.equal(first[name], second[name]) for name in telling)
    return FIXED if same == len(telling) else PARTLY if same else RANDOM
