"""Fully connected networks: the targets of direct inversion and of the Cocktail Party Attack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fedprism.checks import shape, whole

MOST_UNITS = 2**20
"""Units of one layer: bounds memory."""


def dense(input_shape: Sequence[int], classes: int) -> nn.Module:
    """One linear layer on the flattened input."""
    features = math.prod(shape(input_shape, "input_shape"))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, whole(classes, "classes", MOST_UNITS)))


def fc2(input_shape: Sequence[int], hidden: int = 256, classes: int = 10) -> nn.Module:
    """Two linear layers with a ReLU between them."""
    features = math.prod(shape(input_shape, "input_shape"))
    whole(hidden, "hidden", MOST_UNITS)
    whole(classes, "classes", MOST_UNITS)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
