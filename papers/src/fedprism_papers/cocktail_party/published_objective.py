"""The published Cocktail Party objective: un-mixing by decorrelation and image or embedding priors, with Adam.

Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using Independent
Component Analysis", ICML 2023. Kept for comparison and ablation.

A layer's gradient G = A X mixes the inputs X. Whiten G to X_w = V (G - mean), look for rows w of unit length, and take
w V G as the estimated inputs. Minimised over w, with S = w V G and n rows:

    independence * mean over pairs i != j of (exp(temperature |w_i . w_j|) - 1)
    + total_variation * (mean |horizontal| + mean |vertical difference| of S)
    + sparsity * mean |S| + sign * mean over i of min(|positive part of S_i|, |negative part of S_i|)
    - negentropy * mean over i of (E[log cosh w_i X_w] - E[log cosh of a standard normal])^2

Differs from the paper's code in: the negentropy is measured from that of a Gaussian, without which it prefers the wrong
kind of source (the published runs leave it out, as the default does); whitening is symmetric, in float64, with a floor;
the rows returned are those with the smallest objective, not the last ones, since Adam with a constant rate keeps moving
around the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from fedprism.runtime.cuda_graphs import Repeated
from fedprism.solvers.matching.features import FeatureInversion
from fedprism.solvers.matching.gradients import Progress

GAUSSIAN_LOG_COSH = 0.374567
"""E[log cosh] of a standard normal variable."""


@dataclass(frozen=True, kw_only=True)
class CocktailObjective:
    """Weights of the objective and how it is minimised; by default as published for FC-2 on Tiny-ImageNet."""

    independence: float = 1.47
    temperature: float = 12.4
    total_variation: float = 3.1
    sparsity: float = 0.0
    sign: float = 0.0
    negentropy: float = 0.0
    lr: float = 1e-3
    iterations: int = 25_000

    def rows(self, coordinates: Tensor, image_shape: Sequence[int] | None, progress: Progress | None) -> Tensor:
        return separate(self, coordinates, image_shape, progress=progress).double()


def embedding_objective() -> CocktailObjective:
    """As published for the embeddings of VGG-16 on ImageNet, which are sparse and not negative."""
    return CocktailObjective(independence=5.3, temperature=7.7, total_variation=0.0, sparsity=5.0, sign=0.13)


def published_inversion() -> FeatureInversion:
    """Images from features pixel by pixel, with the paper's weight of smoothness."""
    return FeatureInversion(total_variation=0.1, falloff=0.0)


def separate(
    objective: CocktailObjective,
    coordinates: Tensor,
    image_shape: Sequence[int] | None,
    *,
    progress: Progress | None = None,
) -> Tensor:
    """Rows (n, n) such that rows @ coordinates (n, d) are the estimated sources, up to order, sign and scale."""
    problem, device = _problem(objective, coordinates, image_shape), coordinates.device
    weights = torch.eye(len(coordinates), device=device).requires_grad_()
    weights.grad = turn = torch.zeros_like(weights)
    adam = torch.optim.Adam([weights], lr=objective.lr, capturable=device.type == "cuda")
    best, lowest = weights.detach().clone(), torch.full((), torch.inf, device=device)

    @torch.no_grad()
    def step() -> None:
        lengths = weights.norm(dim=1, keepdim=True)
        rows = weights / lengths
        value, slope = _value_and_slope(problem, rows)
        better = value < lowest  # stays on the device, so that a GPU need not wait; False for NaN
        best.copy_(torch.where(better, rows, best))
        lowest.copy_(torch.where(better, value, lowest))
        # Only the part across a row turns it; the part along it is what the normalisation takes away.
        turn.copy_((slope - (slope * rows).sum(1, keepdim=True) * rows) / lengths)
        adam.step()

    repeated = Repeated(step, device)
    for iteration in range(objective.iterations):
        repeated()
        if progress is not None:
            progress(iteration + 1, objective.iterations)
    return (best.double() @ problem.whitening).to(coordinates.dtype)


class _Problem(NamedTuple):
    objective: CocktailObjective
    whitening: Tensor
    """(n, n) float64"""
    signal: Tensor
    """(n, d) float32, whitened and not centred: what the priors look at."""
    centred: Tensor | None
    """(n, d) float32, whitened and centred, where the negentropy needs it."""
    sides: tuple[int, ...]
    """The shape of an image."""


def _problem(objective: CocktailObjective, coordinates: Tensor, image_shape: Sequence[int] | None) -> _Problem:
    """Everything that does not change from step to step."""
    mixtures = coordinates.detach().double()
    whitening, mean = _whitening(mixtures)
    return _Problem(
        objective,
        whitening,
        (whitening @ mixtures).float(),
        (whitening @ (mixtures - mean)).float() if objective.negentropy else None,
        _sides(image_shape, mixtures.shape[1]) if objective.total_variation else (),
    )


def _whitening(mixtures: Tensor) -> tuple[Tensor, Tensor]:
    """V (n, n) such that V (mixtures - mean) has uncorrelated rows of variance one, and the mean (n, 1)."""
    if not mixtures.isfinite().all():
        raise ValueError("mixtures must be finite. Leave out infinite and missing numbers first.")
    mean = mixtures.mean(dim=1, keepdim=True)
    centred = mixtures - mean
    values, vectors = torch.linalg.eigh(centred @ centred.T / max(1, mixtures.shape[1] - 1))
    # Directions in which nothing varies would be blown up without limit.
    floor = len(values) * torch.finfo(values.dtype).eps * values[-1]
    scales = values.clamp(min=floor.clamp(min=torch.finfo(values.dtype).tiny)).rsqrt()
    return (scales * vectors).T.flip(0), mean  # the strongest direction first


def _sides(image_shape: Sequence[int] | None, features: int) -> tuple[int, ...]:
    """The shape of an image, checked: at least two sides and as many entries as the mixtures."""
    sides = tuple(image_shape or ())
    if len(sides) < 2 or math.prod(sides) != features:
        raise ValueError(
            f"image_shape must hold {features} entries, with height and width, for the total variation, "
            f"not {image_shape}. Give the shape or set total_variation to 0."
        )
    return sides


def _value_and_slope(problem: _Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The objective at rows (n, n) of unit length, and its derivative with respect to them."""
    objective = problem.objective
    value, slope = _decorrelation(rows, objective.independence, objective.temperature)
    if objective.total_variation or objective.sparsity or objective.sign:
        priors = _prior_slope(objective, rows @ problem.signal, problem.sides) @ problem.signal.T
        # The priors double when the rows do, so that their value is the rows times their slope (Euler's theorem).
        value, slope = value + (rows * priors).sum(), slope + priors
    if problem.centred is not None:
        gain, gain_slope = _negentropy(rows, problem.centred)
        value, slope = value - objective.negentropy * gain, slope - objective.negentropy * gain_slope
    return value, slope


def _decorrelation(rows: Tensor, weight: float, temperature: float) -> tuple[Tensor, Tensor]:
    """weight times the mean over pairs i != j of exp(temperature |w_i . w_j|) - 1, and its slope."""
    mean = weight / max(1, len(rows) * (len(rows) - 1))
    products = (rows @ rows.T).fill_diagonal_(0)
    excess = (temperature * products.abs()).expm1()
    pull = products.sign() * (excess + 1)
    return mean * excess.sum(), (2 * mean * temperature) * (pull @ rows)


def _prior_slope(objective: CocktailObjective, sources: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Derivative of the priors by the sources (n, d); automatic differentiation would pass over these more often."""
    slope = torch.zeros_like(sources)
    if objective.total_variation:
        images, image_slope = sources.view(-1, *sides), slope.view(-1, *sides)
        for side in (-1, -2):
            steps = images.diff(dim=side).sign_()
            weight = objective.total_variation / max(1, steps.numel())
            image_slope.narrow(side, 1, steps.shape[side]).add_(steps, alpha=weight)
            image_slope.narrow(side, 0, steps.shape[side]).sub_(steps, alpha=weight)
    if objective.sparsity:
        slope.add_(sources.sign(), alpha=objective.sparsity / sources.numel())
    if objective.sign:
        slope.add_(_shorter_part(sources), alpha=objective.sign / len(sources))
    return slope


def _shorter_part(sources: Tensor) -> Tensor:
    """The positive or the negative part of each source, whichever is shorter, as a unit vector; zeros if empty."""
    positive, negative = sources.clamp(min=0), sources.clamp(max=0)
    keep_negative = positive.norm(dim=1, keepdim=True) > negative.norm(dim=1, keepdim=True)
    return normalize(torch.where(keep_negative, negative, positive), dim=1)


def _negentropy(rows: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over sources of the squared distance of E[log cosh] from a Gaussian's, and its slope."""
    sources = rows @ centred
    size = sources.abs()
    gaps = (size + softplus(-2 * size)).mean(dim=1, keepdim=True) - math.log(2) - GAUSSIAN_LOG_COSH
    slope = (2 / centred.numel()) * gaps * (sources.tanh() @ centred.T)
    return gaps.square().mean(), slope
