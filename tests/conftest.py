"""Small real scenarios that many tests share."""

from __future__ import annotations

import pytest
import torch

import fedprism as fp

# Small problems: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def photos() -> fp.data.ImageSet:
    return fp.data.load("photos", size=32)


@pytest.fixture(scope="session")
def digits() -> fp.data.ImageSet:
    return fp.data.load("digits", size=16)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def double(batch: fp.Batch) -> fp.Batch:
    return fp.Batch(batch.inputs.double(), batch.labels)
