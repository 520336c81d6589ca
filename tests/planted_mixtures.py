"""Inputs planted behind a random mixing, and how close answers come to them."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

import fedprism as fp


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def colour(photos: fp.data.ImageSet, count: int, seed: int) -> Tensor:
    return photos.draw(count, seeded(seed)).inputs.double()


def planted(inputs: Tensor, units: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of a dense layer's weight and bias for inputs (n, ...) with random signals."""
    signals = torch.randn(units, len(inputs), generator=seeded(seed), dtype=torch.float64)
    return signals @ inputs.double().flatten(1), signals.sum(1)


def decibels(answer: Tensor, inputs: Tensor) -> Tensor:
    """PSNR (n,) of each input's counterpart under the best assignment; values are not clipped."""
    answer, inputs = answer.double(), inputs.double().flatten(1)
    assert answer.shape == inputs.shape
    errors = torch.stack([(answer - one).square().mean(1) for one in inputs], dim=1)
    rows, order = linear_sum_assignment(errors.clamp(min=1e-30).log10().numpy())
    return -10 * errors.clamp(min=1e-30)[rows, order].log10()


def resemblance(answer: Tensor, inputs: Tensor, *, centred: bool = True) -> Tensor:
    """Size of the correlation (n,), or of the cosine, of each input with its counterpart under the best assignment."""
    first, second = answer.double(), inputs.double().flatten(1)
    if centred:
        first, second = first - first.mean(1, keepdim=True), second - second.mean(1, keepdim=True)
    cosines = (normalize(first) @ normalize(second).T).abs()
    return cosines[linear_sum_assignment(-cosines.numpy())]
