"""Samples that were read in part, refined by least squares on the whole update, in double precision.

Closed forms read one or two layers. What rounding leaves open of these, the rest of the update still tells.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.gradient_matching.forward import Forward, likely_forward
from fedprism.runtime import progress
from fedprism.types import Observation, Update

EQUATIONS = 4
"""Numbers of the update that are compared for each open number: far more than needed, far fewer than there are."""
MORE_EQUATIONS = 2_000
"""Numbers that are compared besides."""
DIFFERENCE = 1e-6
"""Step of the differences that stand for derivatives: in double precision their error is far below rounding."""
LEAST_NOISE = 0.1
"""Rounding of a row's numbers is at least this part of their format's precision, relative to their size."""
LEAST_SHARE = 1e-4
"""The same, relative to the size of the largest rows: it is for rows that are nothing but rounding."""
FIRST_DAMPING = 1e-3
"""Of the first step, relative to the diagonal."""
EASED, TIGHTENED = 10.0, 8.0
"""Factors of the damping after a step that explains more, and after one that does not."""
HOPELESS = 1e6
"""Damping from which a step moves nothing."""
KEPT = 0.5
"""Part of the misfit that a step must gain for the slopes to be used once more."""
SETTLED = 1e-3
"""Part of the misfit that a step must gain for another one to follow."""
ROUNDING_ONLY = 4.0
"""Mean square of what is left, in units of rounding, from which it is nothing else."""


class Refined(NamedTuple):
    samples: Tensor
    """(samples, entries)"""
    error: Tensor
    """(samples, entries): the standard deviation that what is left unexplained gives each entry."""


def refine(observation: Observation, samples: Tensor, directions: Tensor, labels: Tensor, steps: int) -> Refined:
    """Move samples (samples, entries) along directions (open numbers, samples, entries) to explain the update best.

    Levenberg-Marquardt on the open numbers, which are about one beforehand: that is how long the directions have to be.
    Each equation is weighed by what single precision makes of it, so that small rows tell as much as large ones.
    """
    misfit = _Misfit(observation, samples.double(), directions.double().flatten(1), labels)
    numbers, damping, fresh = torch.zeros(len(directions), dtype=torch.float64), FIRST_DAMPING, True
    left = misfit(numbers)
    slopes = misfit.slopes(numbers, left)
    for step in range(steps):
        progress.report(step, steps)
        noise = float(left.square().mean())
        matrix, pull = slopes.T @ slopes, slopes.T @ left + noise * numbers
        matrix.diagonal().add_(noise)
        tried = numbers - torch.linalg.solve(matrix + damping * torch.diag(matrix.diagonal()), pull)
        after = misfit(tried)
        cost = float(left.square().sum() + noise * numbers.square().sum())
        gained = cost - float(after.square().sum() + noise * tried.square().sum())
        damping = damping / EASED if gained > 0 else damping * TIGHTENED
        if gained > 0:
            numbers, left = tried, after
        if float(left.square().mean()) < ROUNDING_ONLY or (fresh and 0 < gained < SETTLED * cost) or damping > HOPELESS:
            break
        # Slopes cost as much as there are open numbers: they are kept as long as they lead on fast.
        if gained > KEPT * cost or (fresh and gained <= 0):
            fresh = fresh and gained <= 0
        else:
            slopes, fresh = misfit.slopes(numbers, left), True
    spread = torch.linalg.inv(matrix / noise + torch.eye(len(matrix), dtype=torch.float64))
    error = ((spread @ misfit.directions) * misfit.directions).sum(0).clamp_min(0).sqrt()
    return Refined(misfit.moved(numbers), error.view_as(samples))


class _Misfit:
    """The difference between a part of two updates, in units of rounding, as a function of the open numbers."""

    def __init__(self, observation: Observation, samples: Tensor, directions: Tensor, labels: Tensor) -> None:
        self.observation, self.samples, self.directions, self.labels = observation, samples, directions, labels
        self.forward = doubled(likely_forward(observation))
        weights = self._weights()
        # Which numbers are compared is the same whenever it is asked.
        count, rng = EQUATIONS * len(directions) + MORE_EQUATIONS, torch.Generator().manual_seed(0)
        self.chosen = torch.randperm(len(weights), generator=rng)[:count]
        self.weights = weights[self.chosen]
        self.target = self.weights * _flat(self.forward.target)[self.chosen]

    def _weights(self) -> Tensor:
        """One over the rounding of each number of the update, as the client's own number format shows it."""
        given = likely_forward(self.observation)
        eps, rounded = torch.finfo(given.target[0].dtype).eps, self.samples.to(given.target[0].dtype)
        exact, short = (self._update(forward, rounded) for forward in (self.forward, given))
        sizes = [_row_sizes(tensor) for tensor in self.forward.target]
        largest = max(float(size.max()) for size in sizes)
        noise = [
            _row_sizes(full - half.double()) + eps * (LEAST_NOISE * size + LEAST_SHARE * largest)
            for full, half, size in zip(exact, short, sizes, strict=True)
        ]
        return 1 / _flat([size.expand_as(tensor) for size, tensor in zip(noise, exact, strict=True)])

    def _update(self, forward: Forward, samples: Tensor) -> list[Tensor]:
        like = forward.target[0]
        inputs = self.observation.knowledge.shaped(samples.to(like.dtype), like=like)
        return [tensor.detach() for tensor in forward(inputs, self.labels, create_graph=False)]

    def moved(self, numbers: Tensor) -> Tensor:
        return self.samples + (numbers @ self.directions).view_as(self.samples)

    def __call__(self, numbers: Tensor) -> Tensor:
        guess = self.weights * _flat(self._update(self.forward, self.moved(numbers)))[self.chosen]
        # The scale of an update is not known, and of a difference not its sign.
        misfit: Tensor = (guess @ self.target) / (guess @ guess) * guess - self.target
        return misfit

    def slopes(self, numbers: Tensor, here: Tensor) -> Tensor:
        """By differences, because not every operation can be differentiated twice."""
        slopes = here.new_empty(len(here), len(numbers))
        for number in range(len(numbers)):
            beside = numbers.clone()
            beside[number] += DIFFERENCE
            slopes[:, number] = (self(beside) - here) / DIFFERENCE
        return slopes


def doubled(forward: Forward) -> Forward:
    """The same client in double precision."""

    def double(update: Update) -> dict[str, Tensor]:
        return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in update.items()}

    return dataclasses.replace(
        forward,
        model=forward.model.double(),
        params=double(forward.params),
        buffers=double(forward.buffers),
        target=tuple(tensor.double() for tensor in forward.target),
    )


def _flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _row_sizes(tensor: Tensor) -> Tensor:
    """The root mean square of each row, to be broadcast; of a vector that of all its numbers."""
    sides = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else (0,) * tensor.dim()
    return tensor.square().mean(sides, keepdim=True).sqrt() if sides else tensor.abs()
