"""Feature inversion: images whose features, somewhere inside a network, are the given ones.

The last stage of Kariyappa et al., "Cocktail Party Attack", ICML 2023: once the embeddings of a batch are known, each
image is found by itself. Minimised for each image x with features z, by Adam with a rate that falls along a cosine:

    distance(f(x), z) + total_variation * (mean |horizontal| + mean |vertical difference| of x)

Differs from the paper in: images are searched for by their Fourier coefficients, low frequencies first (Olah,
Mordvintsev, Schubert, "Feature Visualization", 2017), unless `falloff` is 0; each image's best
iterate by its own objective is returned, not the last one; the objectives of images are added, not averaged, so that an
image's answer does not depend on its neighbours; fewer iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.runtime.memory import together
from fedprism.solvers.matching.gradients import Progress

FeatureDistance: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(features (n, f), target (n, f)) -> (n,), zero where they agree."""


class FeatureStatus(StrEnum):
    ITERATIONS = "stopped at the iteration limit; each image's best iterate is returned"
    PARTIAL = "some images had no usable features or no finite objective and are not to be trusted"
    UNUSABLE = "no image had usable features and a finite objective; none is to be trusted"


class InvertedFeatures(NamedTuple):
    inputs: Tensor
    """(n, *input_shape)"""
    cosines: Tensor
    """(n,) between each returned image's features and its target; 0 where the target is zero or not finite."""
    objective: Tensor
    """(n,) of the returned images; infinite where it was never finite."""
    status: FeatureStatus


@dataclass(frozen=True, kw_only=True)
class FeatureInversion:
    """How features are inverted, `microbatch` images at a time.

    falloff: Adam moves an image's Fourier coefficient of frequency f by 1 / f**falloff, about the spectrum of
    photographs, so that patterns that only please the network come last. 0: it moves pixels.
    bfloat16: the network computes with 8 bits of mantissa, in about half the time on a GPU.
    """

    iterations: int = 4000
    lr: float = 0.1
    total_variation: float = 0.5
    falloff: float = 1.0
    bfloat16: bool = False
    microbatch: int = 16


NOISE = 0.1
"""Standard deviation, in pixel values, of the noise that a search by frequencies starts from."""


def first_guess(noise: Tensor, settings: FeatureInversion) -> Tensor:
    """A start for `invert_features` out of white noise (n, *input_shape): as it is, or coloured as the search wants."""
    frequencies = _Frequencies.of(noise, settings)
    return noise if frequencies is None else NOISE * frequencies.pixels(torch.fft.rfft2(noise, norm="ortho"))


def feature_cosine(features: Tensor, target: Tensor) -> Tensor:
    """One minus the cosine of each row's angle to its target: for embeddings known up to a positive scale."""
    return 1 - _cosines(features, target)


def feature_error(features: Tensor, target: Tensor) -> Tensor:
    """Squared distance of each row from its target, relative to the target's size: for embeddings known exactly."""
    return (features - target).square().sum(1) / target.square().sum(1)


def invert_features(
    features_of: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    *,
    box: tuple[Tensor, Tensor] | None = None,
    settings: FeatureInversion = FeatureInversion(),
    distance: FeatureDistance = feature_cosine,
    extra: Callable[[Tensor], Tensor] | None = None,
    progress: Progress | None = None,
) -> InvertedFeatures:
    """Find inputs, from start (n, *input_shape), whose features_of are target (n, features).

    features_of must be differentiable and treat each image by itself (no batch statistics, no dropout). `box` (low,
    high), broadcastable to the inputs: every iterate lies in it. `extra` is an objective of the whole batch, such as
    gradient matching, added to each image's own: then the iterate returned is the best of the batch.
    """
    if len(target) != len(start):
        raise ValueError(f"target must hold one entry per image, not {len(target)} for {len(start)} images.")
    target = target.detach().to(start).flatten(1)
    size = target.square().sum(1)
    usable = size.isfinite() & (size > 0)
    # A stand-in keeps the others' gradients finite; without features an image has only `extra` to go by.
    target = torch.where(usable.unsqueeze(1), target, torch.ones_like(target))
    bounds = [] if box is None else [bound.to(start).expand_as(start) for bound in box]
    inputs = start.detach().clamp(*bounds) if bounds else start.detach().clone()
    objective, cosines = start.new_full((len(start),), torch.inf), start.new_zeros(len(start))
    step = max(1, len(start)) if extra is not None else together(min(len(start), settings.microbatch))
    chunks = [slice(first, first + step) for first in range(0, len(start), step)]
    for number, chunk in enumerate(chunks):
        chunk_bounds = tuple(bound[chunk] for bound in bounds)
        problem = _Problem(features_of, target[chunk], usable[chunk], chunk_bounds, distance, extra)
        for done, (best, lowest) in enumerate(_invert(problem, inputs[chunk], settings)):  # noqa: B007 (the last)
            if progress is not None and done:
                progress(number * settings.iterations + done, len(chunks) * settings.iterations)
        inputs[chunk], objective[chunk] = best, lowest
        with torch.no_grad():
            cosines[chunk] = _cosines(features_of(inputs[chunk]).flatten(1), target[chunk]) * usable[chunk]
    solved = objective.isfinite()
    status = FeatureStatus.ITERATIONS if bool((solved & usable).all()) else FeatureStatus.PARTIAL
    status = status if bool((solved & usable).any()) or not len(start) else FeatureStatus.UNUSABLE
    return InvertedFeatures(inputs, cosines, objective, status)


class _Problem(NamedTuple):
    features_of: Callable[[Tensor], Tensor]
    target: Tensor
    usable: Tensor
    bounds: tuple[Tensor, ...]
    """Low and high, or nothing."""
    distance: FeatureDistance
    extra: Callable[[Tensor], Tensor] | None


def _invert(problem: _Problem, start: Tensor, settings: FeatureInversion) -> Iterator[tuple[Tensor, Tensor]]:
    """After each iteration the best iterate of each image and its objective; at first the start and infinity."""
    frequencies = _Frequencies.of(start, settings)
    # Complex numbers as pairs of real ones, which Adam takes one by one.
    variable = start.clone() if frequencies is None else torch.view_as_real(frequencies.coefficients(start)).clone()
    adam = torch.optim.Adam([variable.requires_grad_()], lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.iterations)
    best, lowest = start, start.new_full((len(start),), torch.inf)
    for iteration in range(settings.iterations + 1):
        inputs = variable if frequencies is None else frequencies.pixels(torch.view_as_complex(variable))
        if problem.bounds and frequencies is not None:
            inputs = inputs.detach().clamp(*problem.bounds) + (inputs - inputs.detach())  # what is cut off still pulls
        values = _objective(problem, inputs, settings)
        # Decided on the device, so that a GPU need not wait; an objective that is not a number is never smaller.
        better = values < lowest if problem.extra is None else (values.mean() < lowest.mean()).expand_as(values)
        best = torch.where(better.view(-1, *[1] * (inputs.dim() - 1)), inputs.detach(), best)
        lowest = torch.where(better, values.detach(), lowest)
        yield best, lowest
        if iteration == settings.iterations:
            return
        (variable.grad,) = torch.autograd.grad(values.sum(), [variable])
        adam.step()
        schedule.step()
        if problem.bounds and frequencies is None:
            with torch.no_grad():
                variable.clamp_(*problem.bounds)


class _Frequencies(NamedTuple):
    """Images (n, channels, height, width) by their Fourier coefficients, in units of a spectrum."""

    spectrum: Tensor
    """1 / f**falloff (height, width // 2 + 1), flat below one wave an image, with root mean square 1"""
    width: int

    @classmethod
    def of(cls, images: Tensor, settings: FeatureInversion) -> _Frequencies | None:
        """None where pixels, or numbers that are no image, are moved as they are."""
        if settings.falloff == 0 or images.dim() != 4:
            return None
        height, width = images.shape[2:]
        down, across = torch.fft.fftfreq(height).unsqueeze(1), torch.fft.rfftfreq(width)
        spectrum = torch.hypot(down, across).clamp(min=1 / max(height, width)) ** -settings.falloff
        return cls((spectrum / spectrum.square().mean().sqrt()).to(images), width)

    def pixels(self, coefficients: Tensor) -> Tensor:
        """Images from coefficients (n, channels, height, width // 2 + 1)."""
        size = len(self.spectrum), self.width
        images: Tensor = torch.fft.irfft2(coefficients * self.spectrum, s=size, norm="ortho")
        return images

    def coefficients(self, images: Tensor) -> Tensor:
        """Of which `pixels` makes the images."""
        coefficients: Tensor = torch.fft.rfft2(images, norm="ortho") / self.spectrum
        return coefficients


def _objective(problem: _Problem, inputs: Tensor, settings: FeatureInversion) -> Tensor:
    """Each image's objective (n,); an extra objective of the batch counts in full for each of them."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=settings.bfloat16):
        features = problem.features_of(inputs)
    distances = problem.distance(features.to(inputs.dtype).flatten(1), problem.target)
    values = distances * problem.usable + settings.total_variation * _variation(inputs)
    if problem.extra is not None:
        return values + problem.extra(inputs)
    return torch.where(problem.usable, values, torch.inf)  # smoothness alone is no reason to leave the start


def _cosines(features: Tensor, target: Tensor) -> Tensor:
    """The cosine of the angle between each two rows."""
    # The floor keeps the derivative finite where every feature is zero (an image that no unit reacts to).
    tiny = torch.finfo(features.dtype).tiny
    lengths = (features.square().sum(1) + tiny).sqrt() * (target.square().sum(1) + tiny).sqrt()
    return (features * target).sum(1) / lengths


def _variation(inputs: Tensor) -> Tensor:
    """Anisotropic total variation of each image (n,); zero for inputs without two spatial dimensions."""
    variation = inputs.new_zeros(len(inputs))
    for side in (-1, -2) if inputs.dim() >= 4 else ():
        steps = inputs.diff(dim=side).abs().flatten(1)
        variation = variation + steps.sum(1) / max(1, steps.shape[1])
    return variation
