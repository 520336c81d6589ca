"""What scores come to without any attack: a score means something only beside these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedprism.inputs import Inputs, in_structure_of, tensors_of
from fedprism.randomness import generator

MOST_AVERAGED = 1000
"""Samples behind the baselines: a bound on memory."""

BASELINES = {
    "blank": "the middle of the range everywhere",
    "mean": "the mean of other samples",
    "noise": "uniform noise",
    "other": "another sample of the data set",
}


def guesses(pool: Inputs, bounds: tuple[float, float], count: int, seed: int) -> Mapping[str, Inputs]:
    """For each baseline its answer for `count` samples, in the range of `bounds`. `pool`: samples that nobody holds.

    Of whole numbers (tokens, categories) blank is zero, the mean is the most frequent one in each place, and noise is
    drawn from those that occur.
    """
    rng = generator(seed, "baseline")
    each = [_of_one(tensor, bounds, count, rng) for tensor in tensors_of(pool)]
    return {name: in_structure_of(pool, [answers[name].contiguous() for answers in each]) for name in BASELINES}


def _of_one(pool: Tensor, bounds: tuple[float, float], count: int, rng: torch.Generator) -> dict[str, Tensor]:
    low, high = bounds
    shape = pool.shape[1:]
    other = pool[torch.arange(count) % len(pool)]
    if not pool.is_floating_point():
        drawn = pool.flatten()[torch.randint(pool.numel(), (count, *shape), generator=rng)]
        frequent = pool.long().mode(0).values.to(pool).expand(count, *shape)
        return {"blank": torch.zeros_like(other), "mean": frequent, "noise": drawn, "other": other}
    return {
        "blank": torch.full((1, *shape), (low + high) / 2).expand(count, *shape),
        "mean": pool.mean(0, keepdim=True).expand(count, *shape),
        "noise": low + (high - low) * torch.rand(count, *shape, generator=rng),
        "other": other,
    }
