"""A hypercube of samples around one, and what any attacker must get wrong about its vertices on average.

Each vertex is the centre plus or minus half a step along each of several orthonormal directions, cut off at the bounds
of the values. All vertices are equally likely. An attacker who is told every sign but one still faces two samples and
what the noise leaves of the difference of their updates; the errors along different directions add up. Nothing is
differentiated, so that kinks, rounding, pruning and clipping are covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.bounds.overlap import lower_mean

Signal = Callable[[Tensor], Tensor]
"""From a sample, flat, to its update, flat, in units of the noise's standard deviation."""
Doubt = Callable[[Tensor], float]
"""From the difference of two updates to the doubt that is left between them, in [0, 1]."""


class Basis(NamedTuple):
    """Orthonormal directions (d, d): the Kronecker product of square `factors`, whose rows are directions."""

    factors: tuple[Tensor, ...]

    def combine(self, coefficients: Tensor) -> Tensor:
        """The directions weighted by `coefficients` (d,) and added up: (d,)."""
        combined = coefficients.view([len(factor) for factor in self.factors])
        for axis, factor in enumerate(self.factors):
            combined = torch.tensordot(combined, factor, ([axis], [0])).movedim(-1, axis)
        return combined.flatten()

    def direction(self, number: int) -> Tensor:
        size = math.prod(map(len, self.factors))
        return self.combine((torch.arange(size) == number).to(self.factors[0]))


class Cube(NamedTuple):
    """`center` (d,) in [0, 1], orthonormal directions, and how long a step (d,) is along each of them."""

    center: Tensor
    basis: Basis
    steps: Tensor

    @property
    def blind_error(self) -> float:
        """The mean squared error per value of guessing the centre, if no vertex were cut off."""
        return float(self.steps.square().sum() / 4 / self.center.numel())

    def vertex(self, signs: Tensor) -> Tensor:
        return (self.center + self.basis.combine(signs * self.steps / 2)).clamp(0, 1)

    def draw(self, rng: torch.Generator) -> Tensor:
        """One of the vertices, all equally likely."""
        return self.vertex(_signs(len(self.steps), rng))

    def pair(self, rng: torch.Generator) -> Pair:
        """Two vertices that differ in one sign, directions chosen in proportion to their squared steps."""
        number = int(torch.multinomial(self.steps.square(), 1, generator=rng))
        signs = _signs(len(self.steps), rng)
        signs[number] = 1
        first = self.vertex(signs)
        signs[number] = -1
        second = self.vertex(signs)
        # Cutting off at the bounds shortens steps: what counts is what is left along the direction.
        left = float((first - second) @ self.basis.direction(number) / self.steps[number])
        return Pair(first, second, min(left**2, 1.0))


class Pair(NamedTuple):
    """Two vertices, and the part of the squared step that lies between them."""

    first: Tensor
    second: Tensor
    weight: float


class Bound(NamedTuple):
    """The least mean squared error per value of any attacker, over the vertices of `cube`; 0 is no bound."""

    error: float
    cube: Cube
    pairs: int
    witness: Tensor | None
    """(2, d): of the pairs tried the one that is furthest apart and least told apart."""


def promise(cube: Cube, signal: Signal, doubt: Doubt, pairs: int, rng: torch.Generator) -> float:
    """What to expect of a cube, from a few pairs, to choose one by.

    The square of the mean root lies below the mean, the more so the more the values differ: few pairs that leave much
    doubt among many that leave none would be worth little once certified.
    """
    values = [_value(pair, signal, doubt) for pair in (cube.pair(rng) for _ in range(pairs))]
    return cube.blind_error * (math.fsum(map(math.sqrt, values)) / pairs) ** 2


def certify(cube: Cube, signal: Signal, doubt: Doubt, *, pairs: int, confidence: float, rng: torch.Generator) -> Bound:
    """The bound of a cube that was chosen without these pairs; it holds with this confidence."""
    tried = [cube.pair(rng) for _ in range(pairs)]
    values = torch.tensor([_value(pair, signal, doubt) for pair in tried], dtype=torch.float64)
    if not bool(values.any()):
        return Bound(0.0, cube, pairs, None)
    apart = torch.tensor([float((pair.first - pair.second).square().sum()) for pair in tried], dtype=torch.float64)
    best = tried[int((values * apart).argmax())]
    witness = torch.stack([best.first, best.second])
    return Bound(cube.blind_error * lower_mean(values, confidence), cube, pairs, witness)


def without_looking(cube: Cube, doubt: float, *, pairs: int, confidence: float, rng: torch.Generator) -> float:
    """The bound where every two updates are known to leave at least this doubt: no update is computed."""
    weights = torch.tensor([cube.pair(rng).weight for _ in range(pairs)], dtype=torch.float64)
    return cube.blind_error * doubt * lower_mean(weights, confidence)


def _value(pair: Pair, signal: Signal, doubt: Doubt) -> float:
    return pair.weight * doubt(signal(pair.first) - signal(pair.second))


def _signs(count: int, rng: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(2, (count,), generator=rng) - 1
