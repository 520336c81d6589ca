"""What was audited, in words: model, data, and where the weights come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def system(plan: Mapping[str, Any]) -> str:
    """The audited system in a sentence; `plan` is the plan as JSON."""
    captures, model, data = (plan.get(key) for key in ("captures", "model", "data"))
    if isinstance(captures, Mapping):
        folders = captures.get("folders")
        count = len(folders) if isinstance(folders, list) else 0
        return f"Recorded updates ({count} capture{'' if count == 1 else 's'})."
    name = (model.get("name") or model.get("factory")) if isinstance(model, Mapping) else None
    keys = ("name", "folder", "npz", "csv", "factory")
    source = next((data[key] for key in keys if data.get(key)), None) if isinstance(data, Mapping) else None
    return f"{name or 'The given model'}, {weights(plan)}, simulated clients holding {source or 'the given data'}."


def weights(plan: Mapping[str, Any]) -> str:
    """Where the weights come from: updates of a new network and of a trained one leak differently."""
    model = plan.get("model")
    if isinstance(plan.get("captures"), Mapping) or not isinstance(model, Mapping):
        return "recorded weights"
    if model.get("weights"):
        return f"trained weights ({PurePath(str(model['weights'])).name})"
    if model.get("name"):
        return "random weights"
    return "weights as the factory returns them" if model.get("factory") else "weights as given"
