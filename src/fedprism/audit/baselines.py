"""What scores come to without any attack: a score means something only beside these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedprism.audit.materials import Materials
from fedprism.randomness import generator

MOST_AVERAGED = 1000

BASELINES = {
    "blank": "the middle of the range everywhere",
    "mean": "the mean of other samples",
    "noise": "uniform noise",
    "other": "some other sample of the data set",
}


def guesses(materials: Materials, others: Tensor, count: int, seed: int) -> Mapping[str, Tensor]:
    """For each baseline its answer for `count` samples, as inputs of the model. `others` are samples of nobody."""
    assert materials.samples is not None
    low, high = materials.bounds
    pool = materials.samples.batch(others[:MOST_AVERAGED]).inputs
    noise = torch.rand(count, *pool.shape[1:], generator=generator(seed, "baseline"))
    answers = {
        "blank": torch.full((1, *pool.shape[1:]), (low + high) / 2).expand(count, *pool.shape[1:]),
        "mean": pool.mean(0, keepdim=True).expand(count, *pool.shape[1:]),
        "noise": low + (high - low) * noise,
        "other": pool[torch.arange(count) % len(pool)],
    }
    return {name: materials.as_inputs(values.contiguous()) for name, values in answers.items()}
