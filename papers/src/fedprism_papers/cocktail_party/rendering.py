"""The last step of the Cocktail Party Attack: images from recovered features, for chosen samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.attacks.base import Attack
from fedprism.attacks.cocktail_party import attacked_layer, images_with
from fedprism.network.network_map import network_map
from fedprism.solvers import FeatureInversion
from fedprism.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True, repr=False)
class Rendering(Attack):
    """Images that have these features (images, features), up to their length where they are not `sized`."""

    features: Tensor
    inversion: FeatureInversion
    sized: bool

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"bounds", "normalization"})

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        layer = attacked_layer(network_map(observation))
        assert layer is not None  # its inputs were found
        features = self.features.to(observation.rounds[0].params[layer.weight])
        images = images_with(observation, layer, features, self.inversion, rng, sized=self.sized)
        return Reconstruction(inputs=images.inputs)
