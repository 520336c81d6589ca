"""Maximum likelihood for independent sources: the prior a source is held to, and how its likelihood is climbed.

Ablin, Cardoso, Gramfort, "Faster Independent Component Analysis by Preconditioning with Hessian Approximations", 2018
(2 x 2 blocks of the Hessian, and a memory of past steps on top of them); Hyvärinen, Hoyer, Inki, "Topographic
Independent Component Analysis", 2001 (neighbours that share their energy); Lee, Girolami, Sejnowski, "Independent
Component Analysis Using an Extended Infomax Algorithm for Mixed Subgaussian and Supergaussian Sources", 1999
(`TwoHumps`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedprism.solvers.matching.gradients import Progress

MEMORY = 8
"""How many past steps shape the next one."""
HALVINGS = 12
"""Most times that a step is made half as long."""
LEAST_CURVATURE = 0.05
"""Smallest eigenvalue that a 2 x 2 block of the Hessian is given, relative to the number of groups."""
NEIGHBOURS = (0.25, 0.5, 0.25)
"""Weights of a pixel and those beside it where they share their power."""
SETTLED = 1e-6
"""The gain of a step, for each source, below which the search ends."""


class Prior(Protocol):
    """What a source looks like, by its power (n, *grid): at each place the sum of squares of its `groups` channels."""

    def energy(self, power: Tensor, groups: int) -> Tensor:
        """-log p up to a constant, shaped like `power`."""

    def weights(self, power: Tensor, groups: int) -> Tensor:
        """w such that w s is the energy's gradient."""

    def curvature(self, power: Tensor, groups: int) -> Tensor:
        """The sum over the channels of the energy's second derivatives, or more; not negative."""


@dataclass(frozen=True, kw_only=True)
class StudentT:
    """Mostly near zero, sometimes far off."""

    tail: float
    """Degrees of freedom; the smaller, the sparser."""
    neighbours: bool = False
    """Average the power over a pixel and those around it: with few pixels, fewer searches lose their way then."""

    def energy(self, power: Tensor, groups: int) -> Tensor:
        return (self.tail + groups) / 2 * torch.log1p(self._shared(power) / self.tail)

    def weights(self, power: Tensor, groups: int) -> Tensor:
        return self._shared((self.tail + groups) / (self.tail + self._shared(power)))

    def curvature(self, power: Tensor, groups: int) -> Tensor:
        if groups == 1 or self.neighbours:
            # Negative in the tails of one channel, and coupled across neighbours; the weights bound it from above.
            return groups * self.weights(power, groups)
        return (self.tail + groups) * (groups * self.tail + (groups - 2) * power) / (self.tail + power).square()

    def _shared(self, values: Tensor) -> Tensor:
        if not self.neighbours:
            return values
        side = values.new_tensor(NEIGHBOURS)
        return conv2d(values.unsqueeze(1), torch.outer(side, side).view(1, 1, 3, 3), padding=1).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class TwoHumps:
    """Seldom near the middle and never far off, like uniform and binary values: s^2 / 2 - log cosh s, one channel."""

    def energy(self, power: Tensor, groups: int) -> Tensor:
        size = power.sqrt()
        return power / 2 - size - torch.log1p(torch.exp(-2 * size)) + math.log(2)

    def weights(self, power: Tensor, groups: int) -> Tensor:
        size = power.sqrt().clamp(min=torch.finfo(power.dtype).tiny)
        return 1 - torch.tanh(size) / size

    def curvature(self, power: Tensor, groups: int) -> Tensor:
        return torch.tanh(power.sqrt()).square()


class _Point(NamedTuple):
    rotation: Tensor
    """W (n, n)"""
    sources: Tensor
    """(n, g, *grid)"""
    power: Tensor
    """(n, *grid)"""
    value: float


class _Step(NamedTuple):
    move: Tensor
    change: Tensor
    """What the move changed in the gradient."""
    inverse: Tensor
    """1 / <move, change>"""


def maximise_likelihood(
    white: Tensor, rotation: Tensor, prior: Prior, iterations: int, progress: Progress | None = None, *, free: bool
) -> Tensor:
    """Minimise  sum_i mean_p energy(s_ip) - g log|det W|,  s = W white (n, g, *grid), from W = `rotation` on.

    Relative quasi-Newton: W <- (I + E) W, with E from 2 x 2 blocks of the Hessian and the memory of past steps, and
    backtracking. W need not be orthogonal. Unless `free`, its rows keep unit length.
    """
    identity = torch.eye(len(white), dtype=white.dtype, device=white.device)
    point = _point(prior, rotation, (rotation @ white.flatten(1)).view_as(white))
    gradient, curvature = _slopes(prior, point, free)
    memory: deque[_Step] = deque(maxlen=MEMORY)
    for iteration in range(iterations):
        step = None
        for steps in ([*memory], []) if memory else ([],):
            direction = _direction(gradient, curvature, steps, white.shape[1])
            step = _line_search(prior, point, direction, identity, free)
            if step is not None:
                break
            memory.clear()  # the steps of the past do not fit here
        if step is None:
            break
        move, moved = step
        gain, point, before = point.value - moved.value, moved, gradient
        if progress is not None:
            progress(iteration + 1, iterations)
        if gain < SETTLED * len(white):
            break
        gradient, curvature = _slopes(prior, point, free)
        change = gradient - before
        along = (move * change).sum()
        if float(along) > torch.finfo(move.dtype).eps * float(move.norm() * change.norm()):
            memory.append(_Step(move, change, 1 / along))
    return point.rotation


def _point(prior: Prior, rotation: Tensor, sources: Tensor) -> _Point:
    power, groups = sources.square().sum(1), sources.shape[1]
    fit = prior.energy(power, groups).double().flatten(1).mean(1).sum()
    value = fit - groups * torch.linalg.slogdet(rotation.double()).logabsdet
    return _Point(rotation, sources, power, float(value))


def _slopes(prior: Prior, point: _Point, free: bool) -> tuple[Tensor, Tensor]:
    """The gradient (n, n) by E at E = 0, and the curvatures (n, n) that its 2 x 2 blocks are made of."""
    sources, power = point.sources, point.power
    size, groups = sources.shape[:2]
    places = power[0].numel()
    weighted = sources * prior.weights(power, groups).unsqueeze(1)
    gradient = weighted.flatten(1) @ sources.flatten(1).T / places
    gradient = gradient - groups * torch.eye(size, dtype=gradient.dtype, device=gradient.device)
    if not free:
        # What only lengthens a row is undone by keeping its length.
        gradient = gradient - gradient.diagonal().unsqueeze(1) * (point.rotation @ point.rotation.T)
    curvature = prior.curvature(power, groups).flatten(1) @ power.flatten(1).T / (places * groups)
    return gradient, curvature


def _line_search(
    prior: Prior, point: _Point, direction: Tensor, identity: Tensor, free: bool
) -> tuple[Tensor, _Point] | None:
    """The first of ever shorter steps that gains anything: the move E made, and where it leads."""
    step = 1.0
    for _ in range(HALVINGS):
        turn = identity + step * direction
        if not free:
            turn = turn / (turn @ point.rotation).norm(dim=1, keepdim=True)
        moved = _point(prior, turn @ point.rotation, (turn @ point.sources.flatten(1)).view_as(point.sources))
        if moved.value < point.value:
            return turn - identity, moved
        step /= 2
    return None


def _direction(gradient: Tensor, curvature: Tensor, steps: Sequence[_Step], groups: int) -> Tensor:
    """Downhill: the inverse Hessian's blocks, corrected by what past steps have shown of it (limited-memory BFGS)."""
    rest, amounts = gradient, []
    for step in reversed(steps):
        amounts.append(step.inverse * (step.move * rest).sum())
        rest = rest - amounts[-1] * step.change
    direction = _block_newton(rest, curvature, groups)
    for step, amount in zip(steps, reversed(amounts), strict=True):
        direction = direction - (amount + step.inverse * (step.change * direction).sum()) * step.move
    return direction


def _block_newton(gradient: Tensor, curvature: Tensor, groups: int) -> Tensor:
    """Solve [c_ij g; g c_ji] [e_ij; e_ji] = -[gradient_ij; gradient_ji], blocks made positive definite first."""
    other = curvature.T
    smallest = (curvature + other) / 2 - (((curvature - other) / 2).square() + groups**2).sqrt()
    shift = (LEAST_CURVATURE * groups - smallest).clamp(min=0)
    curvature, other = curvature + shift, other + shift
    direction = (groups * gradient.T - other * gradient) / (curvature * other - groups**2)
    diagonal = -gradient.diagonal() / (curvature.diagonal() - shift.diagonal() + groups)
    return direction - torch.diag(direction.diagonal()) + torch.diag(diagonal)
