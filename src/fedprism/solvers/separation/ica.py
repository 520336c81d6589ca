"""Blind separation of a dense layer's inputs: independent component analysis on what makes them independent.

Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using Independent
Component Analysis", ICML 2023 (the idea); Hyvärinen, "Fast and Robust Fixed-Point Algorithms for Independent Component
Analysis", 1999; Ablin, Cardoso, Gramfort, "Faster Independent Component Analysis by Preconditioning with Hessian
Approximations", 2018.

Differs from the paper in: images are separated by their *derivatives*. Pixels of different photographs are correlated
and nearly Gaussian; their differences between neighbours are neither, and any linear filter along the pixels leaves the
mixing as it is. The colour channels and both directions at a pixel are large together, so they share a prior. And the
bias gradient gives every source its scale and sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fedprism.solvers.matching.gradients import Progress
from fedprism.solvers.separation.likelihood import Prior, StudentT, TwoHumps, maximise_likelihood
from fedprism.solvers.separation.mixture import Mixture, reduce_mixture

ITERATIONS = 80
"""Most steps of the likelihood's climb unless said."""
GUIDED_ITERATIONS = 40
"""Most steps under the prior that neighbours share."""
FIXED_POINT_ITERATIONS = 60
"""Most steps of the first guess."""
FIXED_POINT_TOLERANCE = 1e-4
"""One less the cosine of the row that a step of the first guess turns most: below this it has settled."""
LEAST_PLACES = 16
"""Pixels per source that a coarse separation looks at, at least."""
FEW_PLACES = 8
"""Pixels per source below which every detail of the prior tells."""
FEW_CHANNELS = 2
"""Up to so many channels contrasts are often exactly zero (flat parts, features behind a ReLU)."""
TAIL = 0.03
"""Degrees of freedom of the sparsest prior, which needs many places per source."""
SCARCE_TAIL = 0.3
"""The same where places are few."""
MODERATE_TAIL = 3.0
"""The same for signals that are not sparse."""
GAUSSIAN_KURTOSIS = 3.0
"""Below it, signals have lighter tails than a Gaussian."""
NEAR_ZERO = 0.1
"""Values below this, in standard deviations, are nearly zero."""
PILED_UP = 0.13
"""Fraction of nearly zero values in sparse signals: a Gaussian has 0.08, features behind a ReLU had at least 0.16."""
LEAST_BIAS = 1e-6
"""A bias gradient below this fraction of the weight's is rounding error."""
LOUDEST = 3.0
"""No source is scaled to more than this multiple of the batch's median size, however small its bias gradient."""
INSIDE = 0.98
"""Fraction of a source's values that must fit its box; traces of other sources may push the rest outside."""
BOX_SLACK = 2.0
"""By how many standard deviations of the noise values may lie outside of the box."""
VISIBLE_EXCESS = 1.01
"""Factor by which values must be too large for their box to be made smaller."""

Box: TypeAlias = tuple[Tensor, Tensor]


class UnmixStatus(StrEnum):
    SEPARATED = "one source for each independent input"
    FEWER = "fewer independent inputs than asked for"
    FULL = "as many inputs as the layer has units that react, or more: the sources are blends if there are more"
    NOISY = "the gradient does not show where its rank ends; the number of sources is an estimate"
    EMPTY = "the gradient is zero or not finite: nothing to separate"


class Separator(Protocol):
    """A way to unmix."""

    def rows(self, coordinates: Tensor, image_shape: Sequence[int] | None, progress: Progress | None) -> Tensor:
        """Unmixing rows (n, n) of mixtures (n, d), up to order, scale and sign."""


@dataclass(frozen=True, kw_only=True)
class StudentICA:
    """Maximum likelihood under a Student-t prior."""

    derivatives: bool = True
    """Separate differences of neighbouring pixels instead of pixels."""
    grouped: bool = True
    """The channels and directions at a pixel share one prior."""
    tail: float | None = None
    """Degrees of freedom; the smaller, the sparser. None: by how many places there are, and by the kurtosis."""
    iterations: int | None = None
    places: int | None = None
    """Look at no more than about so many pixels, evenly spread; None: at all of them."""

    def rows(self, coordinates: Tensor, image_shape: Sequence[int] | None, progress: Progress | None) -> Tensor:
        signals = contrasts(coordinates, image_shape if self.derivatives else None)
        return separate_by_likelihood(self, signals, progress=progress)


@dataclass(frozen=True, kw_only=True, eq=False)
class WithoutCommon:
    """Unmix what is left when directions that all inputs share are projected out: that leaves the mixing as it is."""

    inner: Separator
    common: Tensor
    """(d, k) with orthonormal columns"""

    def rows(self, coordinates: Tensor, image_shape: Sequence[int] | None, progress: Progress | None) -> Tensor:
        common = self.common.to(coordinates)
        return self.inner.rows(coordinates - coordinates @ common @ common.T, image_shape, progress)


class Unmixing(NamedTuple):
    sources: Tensor
    """(n, d), in the precision of the gradient"""
    unmixing: Tensor
    """(n, h): sources = unmixing @ weight_grad"""
    exact: bool
    """Whether recomputing the gradient confirmed the sources; never so after separation alone."""
    rank: int
    status: UnmixStatus
    scaled: bool
    """Whether scale and sign of the sources are those of the inputs (from the bias gradient) or arbitrary."""
    mixture: Mixture
    rows: Tensor
    """(n, n): the unmixing in the mixture's coordinates"""

    @property
    def noise(self) -> Tensor:
        """(n,) standard deviation of the noise that the gradient's noise leaves in each source"""
        lengths: Tensor = self.rows.norm(dim=1)
        return self.mixture.noise * lengths


def unmix(
    weight_grad: Tensor,
    bias_grad: Tensor | None = None,
    *,
    components: int | None = None,
    image_shape: Sequence[int] | None = None,
    box: Box | None = None,
    objective: Separator = StudentICA(),
    progress: Progress | None = None,
) -> Unmixing:
    """The inputs (n, d) of a dense layer from the gradient of its weight (h, d) and bias (h,), in no particular order.

    `components`: how many samples; by default the numerical rank. `image_shape`: (channels, height, width) of images,
    (channels, length) of signals; without it the inputs are taken to be sparse, like embeddings behind a ReLU.
    `box`: (low, high) of the inputs, broadcastable to (n, d). Without the bias gradient scale and sign stay unknown.
    """
    mixture = usable_mixture(weight_grad, bias_grad, components)
    return unmix_mixture(mixture, weight_grad, components, image_shape, objective, progress, box)


def usable_mixture(weight_grad: Tensor, bias_grad: Tensor | None, components: int | None) -> Mixture | None:
    """The gradient in few coordinates, less a bias gradient of rounding errors; None where it is zero or not finite."""
    if components is not None and components < 1:
        raise ValueError(f"components must be at least 1, not {components}. Leave it out to have them counted.")
    if bias_grad is not None and bool(bias_grad.norm() < LEAST_BIAS * weight_grad.norm()):
        bias_grad = None
    finite = bool(weight_grad.isfinite().all()) and (bias_grad is None or bool(bias_grad.isfinite().all()))
    if not finite or not bool(weight_grad.any()):
        return None
    mixture = reduce_mixture(weight_grad, bias_grad, components)
    return mixture if mixture.size else None


def unmix_mixture(
    mixture: Mixture | None,
    weight_grad: Tensor,
    components: int | None,
    image_shape: Sequence[int] | None,
    objective: Separator,
    progress: Progress | None,
    box: Box | None,
) -> Unmixing:
    """`unmix` from the coordinates on."""
    if mixture is None:
        units, features = weight_grad.shape
        empty = weight_grad.new_zeros(0)
        sources, unmixing = empty.view(0, features), empty.view(0, units)
        mixture = Mixture(unmixing.T, sources, None, 0, 0.0, 0.0)
        return Unmixing(sources, unmixing, False, 0, UnmixStatus.EMPTY, False, mixture, empty.view(0, 0))
    rows = scale_rows(objective.rows(mixture.coordinates, image_shape, progress), mixture, box)
    return Unmixing(
        (rows @ mixture.coordinates).to(weight_grad.dtype),
        (rows @ mixture.basis.T).to(weight_grad.dtype),
        False,
        mixture.rank,
        _status(mixture, components),
        mixture.bias is not None,
        mixture,
        rows,
    )


def _status(mixture: Mixture, components: int | None) -> UnmixStatus:
    if mixture.is_full(components):
        return UnmixStatus.FULL
    if components is not None and mixture.rank < components:
        return UnmixStatus.FEWER
    if mixture.is_drowned and components is None:
        return UnmixStatus.NOISY
    return UnmixStatus.SEPARATED


def scale_rows(rows: Tensor, mixture: Mixture, box: Box | None = None) -> Tensor:
    """Scale unmixing rows (n, n) so that the sources get the inputs' scale and sign: u A = e_i implies u g = 1.

    Sizes are limited, by the `box` too. Without a bias gradient sources get unit size and a positive mean.
    """
    coordinates = mixture.coordinates
    gram = coordinates @ coordinates.T / coordinates.shape[1]
    rows = rows / ((rows @ gram) * rows).sum(1, keepdim=True).clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    if mixture.bias is None:
        means = (rows @ coordinates.mean(1)).unsqueeze(1)
        return torch.where(means < 0, -rows, rows)
    inverse_size = rows @ mixture.bias
    floor = inverse_size.abs().median() / LOUDEST
    limited = torch.where(inverse_size < 0, -1.0, 1.0) * inverse_size.abs().clamp(min=floor)
    limited = torch.where(limited == 0, 1.0, limited)
    rows = rows / limited.unsqueeze(1)
    return rows if box is None else boxed_rows(rows, mixture, box)


def boxed_rows(rows: Tensor, mixture: Mixture, box: Box) -> Tensor:
    """Unmixing rows (n, n) with those made smaller whose sources are too large for the box."""
    sources = rows @ mixture.coordinates
    slack = BOX_SLACK * mixture.noise * rows.norm(dim=1, keepdim=True)
    factors = torch.zeros_like(sources)
    for sign, bound in zip((-1.0, 1.0), box, strict=True):
        # A bound on the other side of zero, or zero itself, says nothing about sizes.
        reach = (sign * bound.to(sources)).expand_as(sources)
        factors = torch.where(reach > 0, torch.maximum(factors, (sign * sources - slack) / reach), factors)
    excess = factors.kthvalue(max(1, round(INSIDE * factors.shape[1])), dim=1, keepdim=True).values
    return rows / torch.where(excess > VISIBLE_EXCESS, excess, 1)


def separate_by_likelihood(
    objective: StudentICA, signals: Tensor, *, start: Tensor | None = None, progress: Progress | None = None
) -> Tensor:
    """Unmixing rows (n, n) for mixtures of `contrasts` (n, groups, *grid), up to order, scale and sign."""
    if objective.places is not None:
        # Never so few that the sources could not be told apart by them.
        few = max(objective.places, LEAST_PLACES * len(signals))
        signals = signals.flatten(2)
        signals = signals[:, :, :: max(1, signals.shape[2] // few)]
    if not objective.grouped:
        signals = signals.flatten(1).unsqueeze(1)
    flat = signals.flatten(2)
    centred = (flat - flat.mean(2, keepdim=True)).view(signals.shape)
    whitening = _whitening(centred.flatten(1))
    white, centred = ((whitening @ values.flatten(1)).float().view(signals.shape) for values in (signals, centred))
    # Free lengths separate colour photographs better; but where contrasts are exactly zero they grow without end.
    free = signals.shape[1] > FEW_CHANNELS
    scarce = signals.dim() == 4 and flat.shape[2] < FEW_PLACES * len(signals)
    if start is not None:
        rotation = torch.linalg.solve(whitening, start, left=False)
        rotation = (rotation / rotation.norm(dim=1, keepdim=True)).float()
    else:
        rotation = _fixed_point(centred.flatten(1))
        if scarce:
            guide = StudentT(tail=SCARCE_TAIL, neighbours=True)
            rotation = maximise_likelihood(white, rotation, guide, GUIDED_ITERATIONS, free=free)
    prior: Prior = StudentT(tail=objective.tail or (SCARCE_TAIL if scarce else TAIL))
    if signals.shape[1] == 1 and objective.tail is None and not _is_sparse(rotation @ white.flatten(1)):
        # Without zeros to be told apart by, the mean is in the way.
        white, prior = centred, _prior_by_kurtosis(rotation @ centred.flatten(1))
    rotation = maximise_likelihood(white, rotation, prior, objective.iterations or ITERATIONS, progress, free=free)
    return rotation.double() @ whitening


def _is_sparse(sources: Tensor) -> bool:
    """Whether the values of most sources (n, places) pile up at zero."""
    near = sources.abs() < NEAR_ZERO * sources.std(1, keepdim=True)
    return float(near.float().mean(1).median()) > PILED_UP


def _prior_by_kurtosis(sources: Tensor) -> Prior:
    """Two humps where most sources (n, places), of zero mean, have lighter tails than a Gaussian; else heavier ones."""
    kurtosis = sources.pow(4).mean(1) / sources.square().mean(1).square()
    return TwoHumps() if float(kurtosis.median()) < GAUSSIAN_KURTOSIS else StudentT(tail=MODERATE_TAIL)


def contrasts(coordinates: Tensor, image_shape: Sequence[int] | None) -> Tensor:
    """What the inputs are told apart by, (n, groups, *grid): differences of images and signals, else the values."""
    if image_shape is None or len(image_shape) < 2 or math.prod(image_shape) != coordinates.shape[1]:
        signals = coordinates.unsqueeze(1)
    else:
        channels, *sides = image_shape
        planes = _opponent_colours(coordinates.view(-1, channels, *sides))
        across = planes.diff(dim=-1)
        if len(sides) == 1 or sides[0] == 1:
            signals = across.flatten(2)
        else:
            down = planes.diff(dim=-2)
            signals = torch.cat([across[..., :-1, :], down[..., :-1]], dim=1)
        if signals[0, 0].numel() < 2:
            signals = coordinates.unsqueeze(1)
    scale = signals.square().transpose(0, 1).flatten(1).mean(1).sqrt()
    return signals / torch.where(scale > 0, scale, 1).view(-1, *[1] * (signals.dim() - 2))


def _opponent_colours(planes: Tensor) -> Tensor:
    """Brightness and two colour differences instead of red, green and blue, which vary together."""
    if planes.shape[1] != 3:
        return planes
    turn = planes.new_tensor([[1, 1, 1], [1, 0, -1], [1, -2, 1]])
    turned: Tensor = torch.tensordot(planes, turn / turn.norm(dim=1, keepdim=True), dims=([1], [1]))
    return turned.movedim(-1, 1)


def _whitening(signals: Tensor) -> Tensor:
    """V (n, n) such that V signals has uncorrelated rows of unit size; directions without signal are not blown up."""
    values, vectors = torch.linalg.eigh(signals @ signals.T / signals.shape[1])
    floor = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    whitening: Tensor = (vectors * values.clamp(min=floor).rsqrt()).T
    return whitening


def _fixed_point(white: Tensor) -> Tensor:
    """Symmetric FastICA with tanh on whitened signals (n, places): a good start, not the answer."""
    size, places = white.shape
    rotation = torch.eye(size, dtype=white.dtype, device=white.device)
    for _ in range(FIXED_POINT_ITERATIONS):
        bent = torch.tanh(rotation @ white)
        slope = (1 - bent.square()).mean(1, keepdim=True)
        turned = _orthogonal(bent @ white.T / places - slope * rotation)
        moved = float((1 - (turned * rotation).sum(1).abs()).max())
        rotation = turned
        if moved < FIXED_POINT_TOLERANCE:
            break
    return rotation


def _orthogonal(rows: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows, by a symmetric eigendecomposition: GPUs are slow at singular values."""
    values, vectors = torch.linalg.eigh(rows.double() @ rows.double().T)
    floor = torch.finfo(torch.float64).eps * values[-1].clamp(min=torch.finfo(torch.float64).tiny)
    turned: Tensor = vectors * values.clamp(min=floor).rsqrt() @ vectors.T @ rows.double()
    return turned.to(rows.dtype)
