"""The search for images whose features are in the spans: Adam on the share outside, then least squares on the rest."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.span_inversion.spanned import Network, Outside, Shares, SpannedLayer
from fedprism.runtime import progress
from fedprism.solvers.matching.least_squares import LeastSquaresStatus, levenberg_marquardt
from fedprism.solvers.matching.priors import TotalVariation

RATE = 0.05
"""Adam's first step, in parts of the range of inputs: a quarter of it often ends in a local minimum."""
SPREAD = 0.075
"""Standard deviation of the start, in parts of the range of inputs."""
SMOOTHING = 0.01
"""Weight of the total variation at the start; it falls to zero."""
WORTH_REFINING = 0.05
"""Share outside the spans up to which least squares are begun: from further away they end in local minima."""
MOST_WRITTEN_OUT = 6_000
"""Unknowns up to which the Jacobian is written out: its square then takes 288 MB."""
ENDS = 10.0
"""Expected errors from which a value is not at the end of its range by chance."""
DOUBTED = 10.0
"""How many times the share outside the spans, of the largest curvature, a curvature may be due to their rounding."""
VALUES_TOGETHER = 2**19
"""Numbers of a Jacobian that are computed together: 4 MB in double precision, and hundreds of times that on the way."""


class Scale(NamedTuple):
    """The range of a network's inputs, as far as it is known."""

    middle: Tensor
    reach: float
    box: tuple[Tensor, Tensor] | None


class Guess(NamedTuple):
    images: Tensor
    """(samples, *input_shape), in double precision"""
    share: float
    """Of what they feed the layers, how much is outside the spans."""
    misfit: float
    """The variance of the residual of least squares; infinite if they were not begun."""
    error: float
    """The expected standard deviation of an input's error, by that variance and the slopes of the residual."""
    open: Tensor
    """(directions, numbers): directions in which the images can be moved by more than `accuracy` and fit as well."""
    status: LeastSquaresStatus | None
    """None if they were not begun."""


def search(
    network: Network,
    layers: list[SpannedLayer],
    shape: tuple[int, ...],
    scale: Scale,
    rng: torch.Generator,
    *,
    iterations: int,
    steps: int,
    accuracy: float,
) -> Guess:
    """Images of this shape, (samples, *input_shape), from one random start."""
    start = scale.middle.float() + SPREAD * scale.reach * torch.randn(shape, generator=rng).to(scale.middle.device)
    images, share = _descend(Shares(network, layers, torch.float32), start, scale, iterations)
    if not share <= WORTH_REFINING:
        nothing = torch.zeros(0, images.numel(), dtype=torch.float64, device=images.device)
        return Guess(images.double(), share, math.inf, math.inf, nothing, None)
    residual = Outside(network, layers, images, rng)
    with torch.no_grad():
        equations = residual(images.double()).numel()
    solved = levenberg_marquardt(
        residual,
        images.double(),
        steps=steps,
        matrix_free=images.numel() > MOST_WRITTEN_OUT,
        columns=max(1, VALUES_TOGETHER // equations),
        listen=lambda step, _: progress.report(iterations + step, iterations + steps),
    )
    misfit = 2 * solved.cost / max(1, equations - images.numel())
    with torch.no_grad():
        share = float(Shares(network, layers, torch.float64)(solved.solution))
    error, directions = math.inf, torch.zeros(0, images.numel(), dtype=torch.float64, device=images.device)
    if solved.normal is not None:
        curvatures, ways = torch.linalg.eigh(solved.normal)
        # The spans themselves are only as exact as the images fit them, and so are the slopes.
        certain = curvatures - DOUBTED * share * curvatures[-1]
        variances = torch.where(certain > 0, misfit / certain, math.inf)
        error = math.sqrt(float(variances.sum()) / images.numel())
        directions = ways.T[variances > images.numel() * accuracy**2]
    images = _at_the_ends(solved.solution, ENDS * error, accuracy, scale)
    return Guess(images, share, misfit, error, directions, solved.status)


def _at_the_ends(images: Tensor, near: float, accuracy: float, scale: Scale) -> Tensor:
    """The images with values that are so near to an end of their range exactly there, unless that is a visible change.

    Black pixels are often zero, at which a ReLU behind a layer without a bias has its kink.
    """
    if scale.box is None or not near <= accuracy:
        return images
    for end in scale.box:
        images = torch.where((images - end).abs() <= near, end.to(images), images)
    return images


def _descend(shares: Shares, start: Tensor, scale: Scale, iterations: int) -> tuple[Tensor, float]:
    """Adam from the start, with a rate that falls to zero; the images with the smallest share that it saw, and that."""
    images = start.clone().requires_grad_()
    smooth = TotalVariation(weight=SMOOTHING)
    adam = torch.optim.Adam([images], lr=RATE * scale.reach)
    best, smallest = start.clone(), math.inf
    for number in range(iterations):
        left = 1 - number / iterations
        for group in adam.param_groups:
            group["lr"] = RATE * scale.reach * math.sqrt(left)
        share = shares(images)
        value = float(share.detach())
        if value < smallest:
            best, smallest = images.detach().clone(), value
        objective = share + left * smooth(images / scale.reach)
        (images.grad,) = torch.autograd.grad(objective, images)
        adam.step()
        if scale.box is not None:
            with torch.no_grad():
                images.clamp_(*scale.box)
        progress.report(number, iterations)
    return best, smallest
