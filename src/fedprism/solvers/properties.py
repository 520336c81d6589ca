"""Whether the data behind an update has a property, learned from updates of which it is known.

Melis, Song, De Cristofaro, Shmatikov, "Exploiting Unintended Feature Leakage in Collaborative Learning", S&P 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

WIDEST = 5000
"""Weight tensors with more connections than this between inputs and outputs are left out."""
TREES = 100
"""Trees of the random forest."""
LEAST_SAMPLES = 5
"""Updates that a leaf of a tree holds at least, and that a node must hold to be split."""
CLEAR = 0.75
"""Out-of-bag AUC from which the property is taken to show in the updates; 0.5 is guessing."""


class PropertyStatus(StrEnum):
    CLEAR = "updates with and without the property differ"
    FAINT = "updates with and without the property hardly differ: the answer is little better than guessing"


class InferredProperty(NamedTuple):
    probabilities: Tensor
    """(updates,) that the data behind each has the property."""
    separation: float
    """AUC among the updates it was learned from, each judged by trees that were not trained on it; 0.5 is guessing."""
    status: PropertyStatus


def telling_tensors(update: Mapping[str, Tensor], *, widest: int = WIDEST) -> tuple[str, ...]:
    """Names of the tensors that a classifier is shown: weights that join at most `widest` pairs of channels."""
    names = tuple(name for name, t in update.items() if t.dim() > 1 and t.shape[0] * t.shape[1] <= widest)
    if not names:
        raise ValueError(f"the update holds no weight tensor of at most {widest} connections. Raise widest.")
    return names


def update_features(updates: Mapping[str, Tensor]) -> Tensor:
    """Unit rows (updates, features) of absolute values, of each kernel the largest, from (updates, *shape) tensors."""
    features = [
        tensor.abs().flatten(3).amax(3).flatten(1) if tensor.dim() > 3 else tensor.abs().flatten(1)
        for tensor in updates.values()
    ]
    return torch.nn.functional.normalize(torch.cat(features, dim=1).double(), dim=1)


def infer_property(examples: Tensor, marks: Tensor, observed: Tensor, *, seed: int = 0) -> InferredProperty:
    """How likely each observed update (updates, features) comes from data with the property, by a random forest.

    examples (examples, features) are updates whose `marks` (examples,) say whether they have it.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import roc_auc_score

    if marks.dtype != torch.bool or bool(marks.all()) or not bool(marks.any()):
        raise ValueError("marks must be boolean, of examples with and without the property, not of one kind.")
    mean, std = examples.mean(0), examples.std(0)
    scale = torch.where(std > 0, std, torch.ones_like(std))
    forest = RandomForestClassifier(
        TREES, min_samples_leaf=LEAST_SAMPLES, min_samples_split=LEAST_SAMPLES, oob_score=True, random_state=seed
    )
    truth = marks.cpu().numpy()
    forest.fit(((examples - mean) / scale).cpu().numpy(), truth)
    separation = float(roc_auc_score(truth, forest.oob_decision_function_[:, 1]))
    probabilities = torch.from_numpy(forest.predict_proba(((observed - mean) / scale).cpu().numpy())[:, 1])
    status = PropertyStatus.CLEAR if separation >= CLEAR else PropertyStatus.FAINT
    return InferredProperty(probabilities, separation, status)
