"""What scores come to without any attack: a score means something only beside these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedprism.randomness import generator

MOST_AVERAGED = 1000
"""Samples behind the baselines: a bound on memory."""

BASELINES = {
    "blank": "the middle of the range everywhere",
    "mean": "the mean of other samples",
    "noise": "uniform noise",
    "other": "some other sample of the data set",
}


def guesses(pool: Tensor, bounds: tuple[float, float], count: int, seed: int) -> Mapping[str, Tensor]:
    """For each baseline its answer for `count` samples, in the range of `bounds`. `pool`: samples that nobody holds."""
    low, high = bounds
    noise = torch.rand(count, *pool.shape[1:], generator=generator(seed, "baseline"))
    answers = {
        "blank": torch.full((1, *pool.shape[1:]), (low + high) / 2).expand(count, *pool.shape[1:]),
        "mean": pool.mean(0, keepdim=True).expand(count, *pool.shape[1:]),
        "noise": low + (high - low) * noise,
        "other": pool[torch.arange(count) % len(pool)],
    }
    return {name: values.contiguous() for name, values in answers.items()}
