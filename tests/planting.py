"""Federations with a planted participation matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Planted(NamedTuple):
    sums: Tensor
    windows: Tensor
    counts: Tensor
    matrix: Tensor
    updates: Tensor


def disjoint_windows(rounds: int, length: int) -> Tensor:
    numbers = torch.arange(rounds) // length
    return (numbers == torch.arange(int(numbers[-1]) + 1)[:, None]).long()


def counted(windows: Tensor, matrix: Tensor) -> Tensor:
    """(users, windows)"""
    return (windows @ matrix.long()).T


def plant(
    users: int,
    rounds: int,
    *,
    rate: float = 0.1,
    window: int = 10,
    parameters: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    rng = torch.Generator().manual_seed(seed)
    matrix = torch.rand(rounds, users, generator=rng) < rate
    return sums_of(matrix, window=window, parameters=parameters, noise=noise, seed=seed, dtype=dtype)


def sums_of(
    matrix: Tensor,
    *,
    window: int = 10,
    parameters: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    rounds, users = matrix.shape
    rng = torch.Generator().manual_seed(seed + 1000)
    updates = torch.randn(users, parameters or 2 * users, generator=rng, dtype=torch.float64)
    sums = matrix.double() @ updates
    each = noise * matrix.sum(1, keepdim=True).double().sqrt()
    sums = sums + each * torch.randn(sums.shape, generator=rng, dtype=torch.float64)
    windows = disjoint_windows(rounds, window)
    return Planted(sums.to(dtype), windows, counted(windows, matrix), matrix, updates)
