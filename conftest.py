"""Small real scenarios that many tests share, and options that try a claim under other seeds and stricter rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fedprism as fp

# Small problems: more threads only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fedprism")
    group.addoption(
        "--shift-seeds",
        type=int,
        default=0,
        metavar="N",
        help="add N to every seed of torch, in tests and package: does a claim hold for other draws?",
    )
    group.addoption("--strict-warnings", action="store_true", help="warnings not listed in pyproject.toml are errors")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-warnings"):
        config.getini("filterwarnings").insert(0, "error")  # before the exceptions: the last filter that fits decides
    if shift := config.getoption("--shift-seeds"):
        _shift_seeds(shift)


def _shift_seeds(shift: int) -> None:
    """Add `shift` to whatever seeds a generator of this process; processes that tests start keep their seeds."""
    plain, default, seed_all = torch.Generator, torch.default_generator, torch.manual_seed

    class ShiftedGenerator(plain):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + shift)

    torch.Generator = ShiftedGenerator  # type: ignore[misc]
    torch.default_generator = SimpleNamespace(manual_seed=lambda seed: default.manual_seed(seed + shift))
    torch.manual_seed = lambda seed: seed_all(seed + shift)


@pytest.fixture(scope="session")
def photos() -> fp.data.ImageSet:
    return fp.data.load("photos", size=32)


@pytest.fixture(scope="session")
def digits() -> fp.data.ImageSet:
    return fp.data.load("digits", size=16)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)
