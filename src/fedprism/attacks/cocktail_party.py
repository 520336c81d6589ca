"""Separates a whole batch, or the sum of several clients' batches, from the gradient of one dense layer.

Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using Independent
Component Analysis", ICML 2023.

Differs from the paper in: images are separated by their derivatives, embeddings by their zeros (`solvers.unmix`); scale
and sign come from the bias gradient; and where the layer has more units than the batch has samples and a ReLU behind
it, the batch comes out exactly, with a certificate (`solvers.exact_batch`). The published objective is one option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism import losses, progress
from fedprism.attacks.base import Attack, only_round
from fedprism.attacks.entrance import Entrance, entrance_of
from fedprism.attacks.forward import FORWARD_USES, QuickForward, forward_model, input_box, one_local_step
from fedprism.attacks.splitting import features_before, network_behind
from fedprism.attacks.structure import DenseLayer, Trace, trace
from fedprism.errors import BadInput, NotApplicable
from fedprism.solvers.assessment import Behind, likely_labels
from fedprism.solvers.denoising import nonlocal_means
from fedprism.solvers.distances import cosine
from fedprism.solvers.exact_batch import ExactBatch, exact_batch
from fedprism.solvers.features import (
    FeatureInversion,
    InvertedFeatures,
    feature_cosine,
    feature_error,
    first_guess,
    invert_features,
)
from fedprism.solvers.ica import StudentICA, unmix
from fedprism.solvers.published import CocktailObjective
from fedprism.types import Ambiguity, Observation, Reconstruction, Round

RUNNING_STATISTICS = (
    "of what the layer was fed: {}; brightness and contrast of each channel are by the running batch-norm statistics, "
    "which a client in train mode does not use"
)
VISIBLE = 0.01
"""Noise below this share of an image's contrast is left alone."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CocktailParty(Attack):
    """Blind separation of a dense layer's inputs; behind convolutions, inversion of the features found.

    objective: how the batch is separated. exact: go on to the exact stage where it applies; without it labels are the
    likeliest ones for what was separated. bias_scale: take scale and sign from the bias gradient; without it they stay
    open. denoise: take what the gradient's noise leaves in images out of them. inversion, images: how features are
    turned into images, and of how many samples (all unless said). matching: weight of a gradient-matching term, with
    which the images found go on for `matching_iterations`; it needs all images and the labels found with them, and the
    status says where it was left out.
    """

    objective: StudentICA | CocktailObjective = StudentICA()  # noqa: RUF009 (frozen)
    exact: bool = True
    bias_scale: bool = True
    denoise: bool = True
    inversion: FeatureInversion = FeatureInversion()  # noqa: RUF009 (frozen)
    images: int | None = None
    matching: float = 0.0
    matching_iterations: int = 300

    citation: ClassVar[str] = "Kariyappa et al. 2023 (Cocktail Party Attack)"

    def __post_init__(self) -> None:
        if min(self.matching, self.matching_iterations, self.images or 0) < 0:
            raise BadInput(
                f"expected matching, matching_iterations and images of at least 0, found {self.matching}, "
                f"{self.matching_iterations} and {self.images}; change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "loss", "bounds", "normalization"}) | FORWARD_USES

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        seen = only_round(self, observation.rounds)
        network = trace(observation)
        layer = attacked_layer(network)
        if layer is None or layer.weight not in seen.update:
            raise NotApplicable(
                "cocktail-party expects a dense layer and its gradient, found none in this model and update; "
                "use gradient-matching instead."
            )
        entrance = entrance_of(observation, layer)
        found = self._separate(observation, seen, network, layer, entrance)
        shape = observation.knowledge.input_shape or ()
        inputs: Tensor | None = None
        features, cosines, status = None, None, found.status
        if entrance is not None:
            fed = found.samples.view(-1, *shape)
            fed = _denoised(fed, found.noise) if self.denoise else fed
            inputs = entrance.inputs(fed.flatten(1), scaled=found.scaled).view(-1, *shape)
            if entrance.by_running_statistics:
                found, status = found._replace(exact=False), RUNNING_STATISTICS.format(status)
        else:
            features = found.samples if found.scaled else found.samples.abs()  # most features are not negative
            inputs, cosines = self._invert(observation, seen, layer, found._replace(samples=features), rng)
            obstacle = self._obstacle_to_matching(found)
            if self.matching and obstacle is not None:
                status = f"{status}; gradient matching was left out because {obstacle}"
        ambiguity: frozenset[Ambiguity] = frozenset({"order"} if found.scaled else {"order", "sign", "scale"})
        return Reconstruction(
            inputs=inputs,
            labels=found.labels,
            features=features,
            ambiguity=ambiguity if features is None else frozenset({"order"}),
            status=status,
            diagnostics={
                "layer": layer.weight,
                "batch_size": len(found.samples),
                "rank": found.rank,
                "exact": found.exact,
                "confirmed": found.confirmed,
                "certificate": found.certificate,
                "feature_cosines": cosines,
            },
        )

    def _separate(
        self, observation: Observation, seen: Round, network: Trace, layer: DenseLayer, entrance: Entrance | None
    ) -> _Found:
        """What the layer was fed, one row a sample."""
        sign = -1.0 if seen.kind == "delta" else 1.0
        weight_grad = sign * seen.update[layer.weight]
        with_bias = self.bias_scale and layer.bias is not None and layer.bias in seen.update
        bias_grad = sign * seen.update[layer.bias or ""] if with_bias else None
        size = observation.knowledge.batch_size
        components = size if isinstance(size, int) else None
        if components is not None and components < 1:
            raise BadInput(
                f"expected a batch_size of at least 1, found {components}; leave it out to have samples counted."
            )
        image_shape = None if entrance is None else observation.knowledge.input_shape
        box = None if entrance is None or image_shape is None else _flat_box(observation, image_shape, entrance)
        behind = None if observation.knowledge.loss is None else _behind(observation, seen, network, layer)
        if not self.exact or behind is None:
            separated = unmix(
                weight_grad,
                bias_grad,
                components=components,
                image_shape=image_shape,
                box=box,
                objective=self.objective,
                progress=progress.report,
            )
            labels = None if behind is None else likely_labels(separated, behind)
            return _Found(
                separated.sources, labels, separated.scaled, separated.rank, separated.status, separated.noise
            )
        batch = exact_batch(
            weight_grad,
            bias_grad,
            behind,
            components=components,
            image_shape=image_shape,
            box=box,
            objective=self.objective,
            rounding=_rounding(seen, layer),
            progress=progress.report,
        )
        return _as_found(batch, components)

    def _invert(
        self, observation: Observation, seen: Round, layer: DenseLayer, found: _Found, rng: torch.Generator
    ) -> tuple[Tensor | None, list[float] | None]:
        """Images whose features before the layer are the ones found."""
        target = found.samples[: self.images]
        if not len(target):
            return None, None
        inverted = images_with(observation, layer, target, self.inversion, rng, sized=found.scaled)
        if self.matching and self._obstacle_to_matching(found) is None and found.labels is not None:
            inverted = self._match(observation, seen, layer, found, inverted.inputs)
        return inverted.inputs, inverted.cosines.tolist()

    def _match(
        self, observation: Observation, seen: Round, layer: DenseLayer, found: _Found, start: Tensor
    ) -> InvertedFeatures:
        """From images that have the features on to such as have the gradient as well."""
        assert found.labels is not None
        labels = found.labels
        forward = forward_model(observation, seen, unroll=False)
        gradients_of = QuickForward(forward)

        def extra(inputs: Tensor) -> Tensor:
            return self.matching * cosine(gradients_of(inputs, labels), forward.target)

        settings = replace(self.inversion, iterations=self.matching_iterations)
        return _inverted(observation, layer, found.samples, start, settings, sized=found.scaled, extra=extra)

    def _obstacle_to_matching(self, found: _Found) -> str | None:
        """Why the gradient of the images that are inverted cannot be compared with the observed one."""
        count = len(found.samples[: self.images])
        if count < len(found.samples):
            return f"only {count} of {len(found.samples)} images were to be inverted"
        return "the labels are unknown" if found.labels is None else None


def cocktail_party() -> CocktailParty:
    """Blind separation of a batch from a dense layer, exactly where possible."""
    return CocktailParty()


def attacked_layer(network: Trace) -> DenseLayer | None:
    """The dense layer whose inputs are separated: the one fed by the inputs, or the first behind the features."""
    return network.fed_by_input() or next((part for part in network.layers if part.inputs.dim() == 2), None)


def images_with(
    observation: Observation,
    layer: DenseLayer,
    features: Tensor,
    inversion: FeatureInversion,
    rng: torch.Generator,
    *,
    sized: bool,
) -> InvertedFeatures:
    """Images, from noise, whose features before the layer are the given ones (samples, features).

    sized: in their size too, where that is known, and not in their direction only.
    """
    noise = torch.randn(len(features), *(observation.knowledge.input_shape or ()), generator=rng).to(features)
    return _inverted(observation, layer, features, first_guess(noise, inversion), inversion, sized=sized)


def _inverted(
    observation: Observation,
    layer: DenseLayer,
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


class _Found(NamedTuple):
    samples: Tensor
    labels: Tensor | None
    scaled: bool
    rank: int
    status: str
    noise: Tensor
    exact: bool = False
    confirmed: int | None = None
    certificate: float | None = None


def _as_found(batch: ExactBatch, components: int | None) -> _Found:
    """An exact batch with repeated samples as often as they count; anything else as it is."""
    samples, labels, noise = batch.inputs, batch.labels, batch.noise
    if batch.exact and batch.times is not None and labels is not None and int(batch.times.sum()) == components:
        samples, labels = samples.repeat_interleave(batch.times, dim=0), labels.repeat_interleave(batch.times)
        noise = noise.repeat_interleave(batch.times)
    return _Found(
        samples,
        labels,
        batch.separation.scaled,
        batch.separation.rank,
        batch.status,
        noise,
        batch.exact,
        int(batch.confirmed.sum()),
        batch.residual,
    )


def _rounding(seen: Round, layer: DenseLayer) -> float:
    """Relative size of the rounding error in an update that is a difference of two models: that of their weights."""
    if seen.kind != "delta":
        return 0.0
    weight, update = seen.params[layer.weight], seen.update[layer.weight]
    errors = torch.finfo(weight.dtype).eps / math.sqrt(12) * float(weight.norm())  # evenly spread over one unit
    if seen.reduction == "sum":
        errors *= math.sqrt(seen.clients)
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


def _behind(observation: Observation, seen: Round, network: Trace, layer: DenseLayer) -> Behind:
    """The network behind the layer. For several local steps: halfway, with what they changed."""
    params, change = dict(seen.params), None
    if seen.kind == "delta" and not one_local_step(observation, seen):
        scale = 0.5 * seen.share
        params = {name: tensor + scale * seen.update[name] for name, tensor in params.items() if name in seen.update}
        params = {**seen.params, **params}
        change = 2 * scale
    weight, bias = layer.weight, layer.bias or ""
    return Behind(
        network=network_behind(observation, seen, layer, network, params),
        loss=losses.resolve(observation.knowledge.loss or "cross_entropy"),
        weight=params[weight],
        bias=params[bias] if bias in params else params[weight].new_zeros(len(params[weight])),
        weight_change=None if change is None else change * seen.update[weight],
        bias_change=None if change is None or bias not in seen.update else change * seen.update[bias],
    )
