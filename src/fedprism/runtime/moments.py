"""Mean and variance of each channel, as batch norm takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """One value per channel, (channels,)."""

    mean: Tensor
    var: Tensor


def channel_moments(features: Tensor, *, unbiased: bool = False) -> Moments:
    """The moments of each channel of (batch, channels, ...), over the batch and all positions.

    The variance is divided by the number of values n, as batch norm does; with `unbiased` by n - 1, as in the running
    average that batch norm keeps.
    """
    values = features.numel() // max(1, features.shape[1])
    var, mean = torch.var_mean(features, [0, *range(2, features.dim())], correction=int(unbiased and values > 1))
    return Moments(mean, var)
