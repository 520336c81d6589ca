"""Separates a whole batch, or the sum of several clients' batches, from the gradient of one dense layer.

Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using Independent
Component Analysis", ICML 2023.

Differs from the paper in: images are separated by their derivatives, embeddings by their zeros (`solvers.unmix`); scale
and sign come from the bias gradient; and where the layer has more units than the batch has samples and a ReLU behind
it, the batch comes out exactly, with a certificate (`solvers.exact_batch`). The published objective is in the
distribution `fedprism-papers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.base import NO_DENSE_LAYER, Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, PreparedForward, forward_model, input_box
from fedprism.client.observed import direction, is_batch_gradient, local_steps, mean_update
from fedprism.errors import BadInput, NotApplicable
from fedprism.naming import preset
from fedprism.network.entrance import Entrance, entrance_of
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.network.operations import Operation
from fedprism.network.splitting import features_before, network_behind
from fedprism.runtime import progress
from fedprism.solvers.denoising import nonlocal_means
from fedprism.solvers.matching.distances import cosine
from fedprism.solvers.matching.features import (
    FeatureInversion,
    InvertedFeatures,
    feature_cosine,
    feature_error,
    first_guess,
    invert_features,
)
from fedprism.solvers.separation.certificate import Downstream, likely_labels
from fedprism.solvers.separation.exact_batch import SETTLED, ExactBatch, exact_batch
from fedprism.solvers.separation.ica import Separator, StudentICA, Unmixing, WithoutCommon, unmix
from fedprism.types import Ambiguity, Observation, Reconstruction, Round, Update

RUNNING_STATISTICS = (
    "of what the layer was fed: {}; brightness and contrast of each channel are by the running batch-norm statistics, "
    "which a client in train mode does not use"
)
ONLY_THE_LAYER = (
    "of what the layer was fed: {}; the update recomputed from the inputs behind it is not the observed one"
)
MOST_SHARED = 4
"""Directions, beside the mean, in which features of public data vary most, that separation looks past. With 0, 4 and 16
of them a batch of 32 was confirmed (512 features, 78 % above zero, 256 units), and without public data none of it."""
VISIBLE = 0.01
"""Standard deviation of noise, relative to an image's, below which it is left alone."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CocktailParty(UpdateAttack):
    """Blind separation of a dense layer's inputs; behind convolutions, inversion of the features found."""

    objective: Separator = StudentICA()  # noqa: RUF009 (frozen)
    exact: bool = True
    """Go on to the exact stage where it applies; without it labels are the likeliest ones for what was separated."""
    bias_scale: bool = True
    """Take scale and sign from the bias gradient; without it they stay open."""
    denoise: bool = True
    """Take what the gradient's noise leaves in images out of them."""
    inversion: FeatureInversion = FeatureInversion()  # noqa: RUF009 (frozen)
    images: int | None = None
    """How many samples' features are turned into images; all unless said."""
    matching: float = 0.0
    """Weight of a gradient-matching term in `matching_iterations` more; needs all images and their labels."""
    matching_iterations: int = 300

    citation: ClassVar[str] = "Kariyappa et al. 2023 (Cocktail Party Attack)"

    def __post_init__(self) -> None:
        if min(self.matching, self.matching_iterations, self.images or 0) < 0:
            raise BadInput(
                f"matching, matching_iterations and images must be at least 0, not {self.matching}, "
                f"{self.matching_iterations} and {self.images}; change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "loss", "bounds", "normalization", "public_data"}) | FORWARD_USES

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.dense_layer_first else NO_DENSE_LAYER

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        round = observation.round
        network = network_map(observation)
        layer = attacked_layer(network, round.update)
        if layer is None:
            raise NotApplicable(
                "cocktail-party needs a dense layer and its gradient, but this model and update hold none; "
                "use gradient-matching instead."
            )
        entrance = entrance_of(observation, layer)
        separation = self.separate(observation, round, network, layer, entrance)
        shape = observation.knowledge.sample_shape
        inputs: Tensor | None = None
        features, cosines, status = None, None, separation.status
        if entrance is not None:
            images = separation.samples.view(-1, *shape)
            images = _denoised(images, separation.noise) if self.denoise else images
            inputs = entrance.inputs(images.flatten(1), scaled=separation.scaled).view(-1, *shape)
            if entrance.by_running_statistics:
                separation, status = separation._replace(exact=False), RUNNING_STATISTICS.format(status)
        else:
            # Most features are not negative.
            features = separation.samples if separation.scaled else separation.samples.abs()
            inputs, cosines = self._invert(observation, round, layer, separation._replace(samples=features), rng)
        # A certificate is about what is returned: the model's inputs, not only the layer's.
        if separation.exact and (inputs is None or not certified(observation, inputs, separation.labels)):
            separation, status = separation._replace(exact=False), ONLY_THE_LAYER.format(status)
        if entrance is None:
            obstacle = self._obstacle_to_matching(separation)
            if self.matching and obstacle is not None:
                status = f"{status}; gradient matching was left out because {obstacle}"
        ambiguity: frozenset[Ambiguity] = frozenset({"order"} if separation.scaled else {"order", "sign", "scale"})
        return Reconstruction(
            inputs=inputs,
            labels=separation.labels,
            features=features,
            ambiguity=ambiguity if features is None else frozenset({"order"}),
            status=status,
            diagnostics={
                "layer": layer.weight,
                "batch_size": len(separation.samples),
                "rank": separation.unmixing.rank,
                "exact": separation.exact,
                "confirmed": separation.confirmed,
                "certificate": separation.certificate,
                "feature_cosines": cosines,
            },
        )

    def separate(
        self, observation: Observation, round: Round, network: NetworkMap, layer: Operation, entrance: Entrance | None
    ) -> _Separation:
        """What the layer was fed, one row per sample."""
        gradient = direction(round, observation.knowledge)
        weight_grad = layer.rows(gradient)
        bias_grad = gradient.get(layer.bias) if self.bias_scale and layer.bias is not None else None
        size = observation.knowledge.batch_size
        components = size if isinstance(size, int) else None
        if components is not None and components < 1:
            raise BadInput(f"batch_size must be at least 1, not {components}; leave it out to have samples counted.")
        image_shape = None if entrance is None else observation.knowledge.sample_shape
        box = None if entrance is None or image_shape is None else _flat_box(observation, image_shape, entrance)
        known = _classifies(observation, network) and _feeds_all(observation, round, network, layer)
        readings = list(_readings(observation, round, network, layer)) if known else []
        if not self.exact or not readings:
            unmixing = unmix(
                weight_grad,
                bias_grad,
                components=components,
                image_shape=image_shape,
                box=box,
                objective=self.objective,
                progress=progress.report,
            )
            labels = likely_labels(unmixing, readings[-1].downstream) if readings else None
            return _Separation(unmixing, unmixing.sources, labels, unmixing.status, unmixing.noise)
        batches = (
            exact_batch(
                sign * weight_grad,
                None if bias_grad is None else sign * bias_grad,
                downstream,
                components=components,
                image_shape=image_shape,
                box=box,
                objective=objective,
                rounding=_rounding(round, layer),
                progress=progress.report,
            )
            for objective in self._objectives(observation, round, layer, entrance)
            for downstream, sign in readings
        )
        return _counted(_first_settled(batches), components)

    def _objectives(
        self, observation: Observation, round: Round, layer: Operation, entrance: Entrance | None
    ) -> Iterator[Separator]:
        """What separation goes by; features of which most are active have much in common, which public data show."""
        yield self.objective
        public = observation.knowledge.public_data
        if entrance is not None or public is None or not isinstance(public.inputs, Tensor) or len(public.inputs) < 2:
            return
        with torch.no_grad():
            fed = features_before(observation, round, layer)(public.inputs.to(next(iter(round.params.values()))))
        features = fed.flatten(1).double()
        mean = features.mean(0, keepdim=True)
        shared = torch.linalg.svd(features - mean, full_matrices=False).Vh[:MOST_SHARED]
        yield WithoutCommon(inner=self.objective, common=torch.linalg.qr(torch.cat([mean, shared]).T).Q)

    def _invert(
        self, observation: Observation, round: Round, layer: Operation, separation: _Separation, rng: torch.Generator
    ) -> tuple[Tensor | None, list[float] | None]:
        """Images whose features before the layer are the ones found."""
        target = separation.samples[: self.images]
        if not len(target):
            return None, None
        inverted = images_with(observation, layer, target, self.inversion, rng, sized=separation.scaled)
        if self.matching and self._obstacle_to_matching(separation) is None and separation.labels is not None:
            inverted = self._match(observation, round, layer, separation, inverted.inputs)
        return inverted.inputs, inverted.cosines.tolist()

    def _match(
        self, observation: Observation, round: Round, layer: Operation, separation: _Separation, start: Tensor
    ) -> InvertedFeatures:
        """Refine images that match the features until they also match the gradient."""
        assert separation.labels is not None
        labels = separation.labels
        forward = forward_model(observation, round, unroll=False)
        gradients_of = PreparedForward(forward)

        def extra(inputs: Tensor) -> Tensor:
            return self.matching * cosine(gradients_of(inputs, labels), forward.target)

        settings = replace(self.inversion, iterations=self.matching_iterations)
        return _inverted(observation, layer, separation.samples, start, settings, sized=separation.scaled, extra=extra)

    def _obstacle_to_matching(self, separation: _Separation) -> str | None:
        """Why the gradient of the images that are inverted cannot be compared with the observed one."""
        count = len(separation.samples[: self.images])
        if count < len(separation.samples):
            return f"only {count} of {len(separation.samples)} images were to be inverted"
        return "the labels are unknown" if separation.labels is None else None


@preset(CocktailParty)
def cocktail_party() -> CocktailParty:
    """Blind separation of a batch from a dense layer, exactly where possible."""
    return CocktailParty()


def attacked_layer(network: NetworkMap, update: Update) -> Operation | None:
    """The dense layer whose inputs are separated: the one fed by the inputs, or the first behind the features."""
    trained = (layer for layer in network.layers if layer.inputs.dim() == 2 and layer.weight in update)
    return network.fed_by_input(update) or next(trained, None)


def images_with(
    observation: Observation,
    layer: Operation,
    features: Tensor,
    inversion: FeatureInversion,
    rng: torch.Generator,
    *,
    sized: bool,
) -> InvertedFeatures:
    """Images whose features before the layer are the given ones (samples, features), if sized in their length too."""
    noise = torch.randn(len(features), *observation.knowledge.sample_shape, generator=rng).to(features)
    return _inverted(observation, layer, features, first_guess(noise, inversion), inversion, sized=sized)


def _inverted(
    observation: Observation,
    layer: Operation,
    features: Tensor,
    start: Tensor,
    inversion: FeatureInversion,
    *,
    sized: bool,
    extra: Callable[[Tensor], Tensor] | None = None,
) -> InvertedFeatures:
    return invert_features(
        features_before(observation, observation.rounds[0], layer),
        features,
        start,
        box=input_box(observation),
        settings=inversion,
        distance=feature_error if sized else feature_cosine,
        extra=extra,
        progress=progress.report,
    )


class _Separation(NamedTuple):
    unmixing: Unmixing
    samples: Tensor
    labels: Tensor | None
    status: str
    noise: Tensor
    exact: bool = False
    confirmed: int | None = None
    certificate: float | None = None

    @property
    def scaled(self) -> bool:
        return self.unmixing.scaled


def _feeds_all(observation: Observation, round: Round, network: NetworkMap, layer: Operation) -> bool:
    """Whether the layer's outputs are all that the rest of the network depends on."""
    try:
        outputs = network_behind(observation, round, layer, network, round.params)(layer.outputs.double())
    except RuntimeError:  # another branch is of another size
        return False
    expected = network.outputs.double()
    return outputs.shape == expected.shape and bool(torch.isclose(outputs, expected, rtol=0.01, atol=1e-4).all())


class _Reading(NamedTuple):
    downstream: Downstream
    sign: int


def _readings(observation: Observation, round: Round, network: NetworkMap, layer: Operation) -> Iterator[_Reading]:
    """What an update may be, its sign, and the network that sent it.

    A difference of parameters may be one step along a gradient, multiplied by anything, or several steps; and it may be
    unknown what was subtracted from what.
    """
    several = not is_batch_gradient(round, observation.knowledge)
    if not several or local_steps(round, observation.knowledge) is None:
        once = _downstream(observation, round, network, layer, change={})
        yield from (_Reading(once, sign) for sign in ((1, -1) if round.kind == "delta" else (1,)))
    if several:
        yield _Reading(_downstream(observation, round, network, layer, change=mean_update(round)), 1)


def _first_settled(batches: Iterator[ExactBatch]) -> ExactBatch:
    """The first answer that explains the gradient; where none does, that with the most inputs confirmed."""
    tried = list[ExactBatch]()
    for batch in batches:
        tried.append(batch)
        if batch.status in SETTLED:
            return batch
    return max(tried, key=lambda batch: int(batch.confirmed.sum()))


def _counted(batch: ExactBatch, components: int | None) -> _Separation:
    """An exact batch with samples as often as they count, unless its size is another one; anything else as it is."""
    samples, labels, noise = batch.inputs, batch.labels, batch.noise
    times = batch.times if batch.exact and labels is not None else None
    if times is not None and labels is not None and components in (None, int(times.sum())):
        samples, labels = samples.repeat_interleave(times, dim=0), labels.repeat_interleave(times)
        noise = noise.repeat_interleave(times)
    confirmed = int(batch.confirmed.sum())
    return _Separation(batch.separation, samples, labels, batch.status, noise, batch.exact, confirmed, batch.residual)


def _rounding(round: Round, layer: Operation) -> float:
    """Relative size of the rounding error in an update that is a difference of two models: that of their weights."""
    if round.kind != "delta":
        return 0.0
    weight, update = round.params[layer.weight], round.update[layer.weight]
    errors = torch.finfo(weight.dtype).eps / math.sqrt(12) * float(weight.norm())  # evenly spread over one unit
    if round.reduction == "sum":
        errors *= math.sqrt(round.clients)
    return errors / max(float(update.norm()), torch.finfo(weight.dtype).tiny)


def _flat_box(observation: Observation, shape: tuple[int, ...], entrance: Entrance) -> tuple[Tensor, Tensor] | None:
    """The range of what comes out of a separation, (1, d) each; None where it is unknown."""
    box = input_box(observation)
    if box is None:
        return None
    low, high = (bound.expand(1, *shape).flatten(1) for bound in box)
    return entrance.box(low, high)


def _denoised(images: Tensor, noise: Tensor) -> Tensor:
    """Images less the noise that is known to be in them, where it can be seen at all."""
    if images.dim() != 4 or min(images.shape) == 0 or min(images.shape[2:]) < 2:
        return images
    visible = noise.to(images) > VISIBLE * images.flatten(1).std(1)
    if not bool(visible.any()):
        return images
    return torch.where(visible.view(-1, 1, 1, 1), nonlocal_means(images, noise.to(images)), images)


def _classifies(observation: Observation, network: NetworkMap) -> bool:
    """Whether the loss takes class numbers for labels, which the exact stage guesses."""
    loss, outputs = observation.knowledge.loss, network.outputs
    return loss is not None and outputs.dim() == 2 and losses.takes_class_numbers(loss, outputs.shape[1])


def _downstream(
    observation: Observation, round: Round, network: NetworkMap, layer: Operation, *, change: Update
) -> Downstream:
    """The network behind the layer. For several local steps: halfway, with what they changed."""
    params = dict(round.params)
    params |= {name: params[name] + 0.5 * moved for name, moved in change.items() if name in params}
    weight, bias = layer.rows(params), layer.bias or ""
    return Downstream(
        network=network_behind(observation, round, layer, network, params),
        loss=losses.resolve(observation.knowledge.loss or "cross_entropy"),
        weight=weight,
        bias=params[bias] if bias in params else weight.new_zeros(len(weight)),
        weight_change=layer.rows(change) if layer.weight in change else None,
        bias_change=change.get(bias),
    )
