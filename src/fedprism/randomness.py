"""Explicit randomness: every random draw comes from a generator derived from a seed and a purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A generator that depends on the seed and on what it is for, not on how many numbers others have drawn.

    It lives on the CPU, so that a seed means the same numbers on every device.
    """
    text = repr((int(seed), *map(str, purpose))).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(number)


@contextmanager
def seeded_layers(rng: torch.Generator) -> Iterator[None]:
    """Seed torch's global state for layers that draw from it (dropout), and restore it afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    seed = int(torch.randint(2**62, (), generator=rng))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
