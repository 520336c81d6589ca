"""How device analytics report how often a device took part: exactly, or so that less can be learned from it.

Laplace and geometric noise of scale 1/epsilon make the reports of one window epsilon-differentially private against one
round more or less: Dwork, McSherry, Nissim and Smith, "Calibrating noise to sensitivity in private data analysis",
2006; Ghosh, Roughgarden and Sundararajan, "Universally utility-maximizing privacy mechanisms", 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.defenses.base import check_number
from fedprism.errors import BadInput
from fedprism.naming import EvaluableRepr

SHARP = 50.0
"""Log-likelihood by which a report that rounding excludes is less likely than one that it allows."""


@dataclass(frozen=True, repr=False)
class CountRelease(EvaluableRepr):
    """Reports true counts as they are."""

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        """What is reported of counts (clients, windows) in windows of lengths (windows,): numbers, NaN where
        withheld."""
        return counts.double()

    def log_likelihood(self, reported: Tensor, true: Tensor) -> Tensor:
        """How likely a report is, up to a term that is the same for all true counts."""
        return torch.where(reported == true, 0.0, -torch.inf)

    @property
    def exact(self) -> bool:
        """Whether every number that is reported is the true count."""
        return True


@dataclass(frozen=True, repr=False)
class WithheldCounts(CountRelease):
    """Each count is missing with this probability."""

    probability: float

    def __post_init__(self) -> None:
        _check_probability(self.probability)

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        hidden = torch.rand(counts.shape, generator=rng) < self.probability
        return torch.where(hidden, torch.nan, counts.double())


@dataclass(frozen=True, repr=False)
class _Noisy(CountRelease):
    @property
    def exact(self) -> bool:
        return False


@dataclass(frozen=True, repr=False)
class BlurredCounts(_Noisy):
    """Each count is off by up to `most`, all errors alike; never below zero or above the window's rounds."""

    most: int

    def __post_init__(self) -> None:
        _check_whole(self.most, "most")

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        shift = torch.randint(-self.most, self.most + 1, counts.shape, generator=rng)
        return torch.minimum((counts + shift).clamp(min=0), lengths).double()

    def log_likelihood(self, reported: Tensor, true: Tensor) -> Tensor:
        return torch.where((reported - true).abs() <= self.most, 0.0, -torch.inf)


@dataclass(frozen=True, repr=False)
class RoundedCounts(_Noisy):
    """Each count is rounded to the nearest multiple of `step`."""

    step: int

    def __post_init__(self) -> None:
        _check_whole(self.step, "step")

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        return (counts.double() / self.step).round() * self.step

    def log_likelihood(self, reported: Tensor, true: Tensor) -> Tensor:
        return torch.where((reported - true).abs() <= self.step / 2, 0.0, -SHARP)


@dataclass(frozen=True, repr=False)
class LaplaceCounts(_Noisy):
    """Adds Laplace noise of scale 1/epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        check_number(self.epsilon, f"{type(self).__name__}'s epsilon", "1 is common")

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        first, second = (torch.empty(counts.shape).exponential_(self.epsilon, generator=rng) for _ in range(2))
        return counts.double() + (first - second).double()

    def log_likelihood(self, reported: Tensor, true: Tensor) -> Tensor:
        return -self.epsilon * (reported - true).abs()


@dataclass(frozen=True, repr=False)
class GeometricCounts(LaplaceCounts):
    """Adds the difference of two geometric numbers: Laplace noise for whole numbers."""

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        stops = 1 - math.exp(-self.epsilon)
        first, second = (torch.empty(counts.shape).geometric_(stops, generator=rng) for _ in range(2))
        return counts.double() + (first - second).double()


@dataclass(frozen=True, repr=False)
class NormalCounts(_Noisy):
    """Adds N(0, std²): its log-likelihood is the least squares that the paper of gradient disaggregation suggests."""

    std: float

    def __post_init__(self) -> None:
        check_number(self.std, f"{type(self).__name__}'s std", "1 is common")

    def release(self, counts: Tensor, lengths: Tensor, rng: torch.Generator) -> Tensor:
        return counts.double() + self.std * torch.randn(counts.shape, generator=rng).double()

    def log_likelihood(self, reported: Tensor, true: Tensor) -> Tensor:
        return -((reported - true) ** 2) / (2 * self.std**2)


COUNT_RELEASES: dict[str, type[CountRelease]] = {
    "exact": CountRelease,
    "withheld": WithheldCounts,
    "blurred": BlurredCounts,
    "rounded": RoundedCounts,
    "laplace": LaplaceCounts,
    "geometric": GeometricCounts,
    "normal": NormalCounts,
}


def _check_probability(value: float) -> None:
    if not 0 <= value <= 1:
        raise BadInput(f"the probability of a missing count must be from 0 to 1, not {value}. 1 withholds all.")


def _check_whole(value: int, name: str) -> None:
    if value != int(value) or value < 1:
        raise BadInput(f"{name} must be a whole number of at least 1, not {value}. Leave it out for exact counts.")
