"""Images out of what the gradients of a network's layers span, found one by one until the update is explained.

The gradient of a convolution is a sum over its positions; with fewer of them than channels, its rows span the patches
that it was fed, whatever else is in the batch and whatever the labels are. An image is looked for whose patches are all
in these spans; then its own gradient is taken out of the update, and the next one is looked for.

Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024, look tokens up in the spans of
attention layers. Differs from it in: nothing is looked up; images are found by least squares on what is outside of the
spans of all layers together, and each is confirmed as a summand of the gradient (Wedderburn 1934).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, input_box
from fedprism.attacks.span_inversion.parts import NO_PART, Part, part_of, without
from fedprism.attacks.span_inversion.search import Guess, Scale, search
from fedprism.attacks.span_inversion.spanned import Network, SpannedLayer, described, network_of, spanned_layers
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.naming import preset
from fedprism.runtime.cuda_graphs import Engine
from fedprism.types import Observation, Reconstruction, Update

NO_SPANS = "too few layers are applied at fewer places than they have units, or a step of it takes long on this device"
ACCURACY = 0.01
"""Expected error, in parts of the range of inputs, up to which an image counts as determined: 40 dB."""
USUAL_REACH = 4.0
"""The range of inputs if it is not known: of pixels divided by their standard deviation."""
SAME_IMAGE = 0.1
"""Distance, relative to their size, below which two images are one: they differ by rounding or noise."""
ALONG = 0.99
"""Cosine from which an open direction is the image itself."""


class SpanInversionStatus(StrEnum):
    EXACT = "the images explain the whole update to rounding error, and the spans determine them"
    GAIN = (
        "the images explain the whole update to rounding error, as they do multiplied by any positive number: their "
        "contrast is chosen to fill the range of inputs"
    )
    AMBIGUOUS = (
        "the images explain the whole update to rounding error, but others that differ visibly may do so as well"
    )
    PARTIAL = (
        "some images are confirmed: each explains its own part of the update to rounding error; the others are not"
    )
    UNCHECKED = "the best images by the spans; whether they explain the whole update could not be checked"
    CONTRADICTED = "the images are in the spans as far as these tell, but do not explain the whole update"
    APPROXIMATE = "no start ended at images that are in the spans: the best of them"


class _Found(NamedTuple):
    guess: Guess
    labels: Tensor | None
    explains: bool
    """Whether the images explain the update, or their part of it, to rounding error."""
    part: Part | None


@dataclass(frozen=True, kw_only=True, repr=False)
class SpanInversion(UpdateAttack):
    """Images whose features are in the spans of the layers' gradients.

    Each image has up to `restarts` random starts, each with `iterations` steps of Adam and at most `steps` of least
    squares.
    """

    iterations: int = 1000
    steps: int = 60
    restarts: int = 3

    citation: ClassVar[str] = "Petrov et al. 2024 (spans of gradients); this project (images by least squares)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape", "loss", "batch_size"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"labels", "bounds", "normalization"}) | FORWARD_USES

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.few_inner_places else NO_SPANS

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        with Engine().settings():  # a GPU's convolutions with 10 bits would hide what is exact
            return self._answer(observation, rng)

    def _answer(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        knowledge = observation.knowledge
        samples = knowledge.batch_size
        assert isinstance(samples, int)
        network, scale = network_of(observation), _scale(observation)
        gradient = direction(observation.round, knowledge)
        passes = (knowledge.local_epochs or 1) if observation.round.kind == "delta" else 1
        first = spanned_layers(network, gradient, samples, passes)
        together = samples if network.by_batch else 1
        _check(first, together, knowledge.sample_shape, samples)
        found, remaining, layers = list[_Found](), dict(gradient), first
        while len(found) * together < samples and _determined(layers, together, knowledge.sample_shape):
            tried = list[_Found]()
            while len(tried) < self.restarts and not (tried and tried[-1].explains):
                guess = self._search(network, layers, (together, *knowledge.sample_shape), scale, rng)
                tried.append(_checked(observation, layers, remaining, guess, samples))
            if not tried[-1].explains:
                found += _different(tried, samples // together - len(found))
                break
            found.append(tried[-1])
            part = tried[-1].part
            if part is not None:
                remaining = without(remaining, part)
                layers = spanned_layers(network, remaining, samples - len(found), passes)
        return _answer(observation, found, scale, described(network, first, gradient))

    def _search(
        self, network: Network, layers: list[SpannedLayer], shape: tuple[int, ...], scale: Scale, rng: torch.Generator
    ) -> Guess:
        return search(
            network,
            layers,
            shape,
            scale,
            rng,
            iterations=self.iterations,
            steps=self.steps,
            accuracy=ACCURACY * scale.reach,
        )


@preset(SpanInversion)
def span_inversion() -> SpanInversion:
    """Exact images out of convolutional networks, by what the gradients of their layers span."""
    return SpanInversion()


def _scale(observation: Observation) -> Scale:
    shape = observation.knowledge.sample_shape
    like = next(iter(observation.round.params.values()))
    box = input_box(observation)
    middle = torch.zeros(1, *shape, dtype=torch.float64, device=like.device)
    if box is None:
        return Scale(middle, USUAL_REACH, None)
    low, high = (bound.double() for bound in box)
    return Scale(middle + (low + high) / 2, float((high - low).mean()), (low.float(), high.float()))


def _determined(layers: list[SpannedLayer], together: int, shape: tuple[int, ...]) -> bool:
    """Whether the spans give more equations than the images have pixels."""
    equations = sum(
        together * layer.candidate.operation.places * (layer.span.basis.shape[1] - layer.span.rank) for layer in layers
    )
    return equations > together * math.prod(shape)


def _check(layers: list[SpannedLayer], together: int, shape: tuple[int, ...], samples: int) -> None:
    if not _determined(layers, together, shape):
        names = ", ".join(layer.candidate.operation.weight for layer in layers)
        those = f"only {names} are such layers" if names else "there are none"
        raise NotApplicable(
            f"span-inversion needs layers that {samples} sample{'s' * (samples > 1)} feed at fewer places than the "
            f"layers have units, enough to determine an image, but {those}; use gradient-matching instead."
        )


def _as_sent(observation: Observation, images: Tensor) -> Tensor:
    """The images as the network is fed them."""
    return images.to(next(iter(observation.round.params.values())))


def _checked(
    observation: Observation, layers: list[SpannedLayer], gradient: Update, guess: Guess, samples: int
) -> _Found:
    """The guess with its labels, held against the whole update or, one of several images, against its part of it."""
    images = _as_sent(observation, guess.images)
    if len(images) < samples:
        part = part_of(observation, layers, gradient, images) if guess.status is not None else NO_PART
        return _Found(guess, None if part.label is None else part.label.cpu(), part.confirmed, part)
    known, labels = observation.knowledge.labels, explaining_labels(observation, images)
    if labels is None and isinstance(known, Tensor):  # in an order that may be another one than that of the images
        labels = known
    return _Found(guess, labels, certified(observation, images, labels) is True, None)


def _different(tried: list[_Found], most: int) -> list[_Found]:
    """The best of several answers that are not the same images."""
    different = list[_Found]()
    for each in sorted(tried, key=lambda found: (found.guess.misfit, found.guess.share)):
        images = each.guess.images
        if all(float((images - other.guess.images).norm()) > SAME_IMAGE * float(images.norm()) for other in different):
            different.append(each)
    return different[:most]


def _answer(observation: Observation, found: list[_Found], scale: Scale, layers: dict[str, str]) -> Reconstruction:
    samples = observation.knowledge.batch_size
    assert isinstance(samples, int)
    images = torch.cat([each.guess.images for each in found])
    gain = len(images) == samples and all(_only_gain_is_open(each.guess) for each in found)
    if gain:
        images = _filling(images, scale)
    inputs = _as_sent(observation, images)
    told = [each.labels for each in found if each.labels is not None]
    labels = torch.cat(told) if len(told) == len(found) else None
    confirmed = [each.explains and each.guess.error <= ACCURACY * scale.reach for each in found]
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        ambiguity=frozenset({"order"}),
        status=_status(observation, found, inputs, labels, confirmed, gain=gain),
        diagnostics={
            "layers": layers,
            "share_outside": [each.guess.share for each in found],
            "confirmed": confirmed,
            "expected_error": [each.guess.error / scale.reach for each in found],
            "open_directions": [len(each.guess.open) for each in found],
            "least_squares": [str(each.guess.status or "not begun") for each in found],
        },
    )


def _status(
    observation: Observation,
    found: list[_Found],
    inputs: Tensor,
    labels: Tensor | None,
    confirmed: list[bool],
    *,
    gain: bool,
) -> SpanInversionStatus:
    complete = len(inputs) == observation.knowledge.batch_size
    explained = certified(observation, inputs, labels) if complete else False
    if explained:
        if gain:
            return SpanInversionStatus.GAIN
        return SpanInversionStatus.EXACT if all(confirmed) else SpanInversionStatus.AMBIGUOUS
    if any(confirmed):
        return SpanInversionStatus.PARTIAL
    if all(each.guess.status is None for each in found):
        return SpanInversionStatus.APPROXIMATE
    return SpanInversionStatus.UNCHECKED if explained is None else SpanInversionStatus.CONTRADICTED


def _only_gain_is_open(guess: Guess) -> bool:
    """Whether the images may be multiplied by any number, and are determined otherwise."""
    if len(guess.open) != 1:
        return False
    image = guess.images.flatten()
    return abs(float(guess.open[0] @ image)) >= ALONG * float(image.norm())


def _filling(images: Tensor, scale: Scale) -> Tensor:
    """The images multiplied so that the brightest or the darkest pixel is at the end of its range."""
    if scale.box is None:
        return images
    low, high = (bound.double() for bound in scale.box)
    fits = torch.where(images > 0, high.clamp_min(0) / images, low.clamp_max(0) / images).nan_to_num(math.inf)
    factor = float(fits.min())
    return images * factor if 0 < factor < math.inf else images
