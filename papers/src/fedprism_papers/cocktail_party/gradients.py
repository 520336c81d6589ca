"""What the Cocktail Party Attack is run on: a victim's gradients or updates, with scores of features and images."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import fedprism as fp
from fedprism.attacks import Attack, CocktailParty
from fedprism.attacks.cocktail_party import attacked_layer, images_with
from fedprism.client.update import Protocol
from fedprism.defenses import Defense
from fedprism.errors import BadInput
from fedprism.network.network_map import network_map
from fedprism.randomness import generator
from fedprism.solvers import FeatureInversion
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.cells import Attacked, AttackTrial
from fedprism_papers.shared.measuring import Scores, samples_of, score_images
from fedprism_papers.shared.victims import Victim, equal_parts, part

COSINE, MEDIAN_COSINE, CLOSE, CONFIRMED = "cosine", "median cosine", "over 0.9", "confirmed"
CLOSE_COSINE = 0.9
"""Above it a feature vector counts as close."""
COSINES = "cosines from 0 to 1"
BINS = 20
"""Of the histogram of cosines."""


@dataclass(frozen=True, kw_only=True)
class VictimBatches(Attacked):
    """`batches` batches of `size` images of a victim, and what its clients do with them."""

    victim: Victim
    size: int
    batches: int
    protocol: Protocol = dataclasses.field(default_factory=fp.FedSGD)
    defense: Defense = dataclasses.field(default_factory=fp.chain)
    public: int = 0
    """How many images that are not attacked the attacker is granted."""

    needs_lpips: ClassVar[bool] = True

    def observe(self, attack: Attack | None, number: int, settings: Settings) -> tuple[fp.Observation, fp.Truth]:
        """One client's answer, or the sum where one client cannot hold the batch."""
        clients = equal_parts(self.victim.draw(self.size, self._rng(number, settings)), self.victim.client_images)
        scenario = fp.Scenario(
            model=self.victim.model,
            clients=clients,
            protocol=self.protocol,
            defense=self.defense,
            normalization=self.victim.normalization,
            public_data=self._others(settings).draw(self.public, generator(settings.seed, "public"))
            if self.public
            else None,
        )
        threat = fp.threats.honest_but_curious if len(clients) == 1 else fp.threats.secure_aggregation
        threat = threat.granting("public_data") if self.public else threat
        return fp.simulate(scenario, threat, seed=settings.seed + number, device=settings.device)

    def rehearsal(self, settings: Settings) -> VictimBatches:
        """One batch of the same kind, out of the images that none of these batches holds."""
        return dataclasses.replace(self, victim=self._others(settings), batches=1)

    def _others(self, settings: Settings) -> Victim:
        """The victim with only those images that none of these batches holds."""
        images = self.victim.images
        left = torch.ones(len(images), dtype=torch.bool)
        for number in range(self.batches):
            left[self.victim.drawn(self.size, self._rng(number, settings))] = False
        if int(left.sum()) < self.size:
            raise BadInput(
                f"a rehearsal needs {self.size} images of {self.victim.name} that are not attacked, but only "
                f"{int(left.sum())} are left. Ask for fewer or smaller batches."
            )
        return dataclasses.replace(self.victim, images=part(images, left), maker=None)

    def _rng(self, number: int, settings: Settings) -> torch.Generator:
        return generator(settings.seed, "batch", self.victim.name, self.size, number)

    def first_stage(self, attack: Attack) -> Attack:
        """Of a batch of which only some images are to be rendered, features: `score` renders."""
        return dataclasses.replace(attack, images=0) if _renders(attack) else attack

    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: fp.Truth) -> Scores:
        """Every method renders the same images, the first ones: an attacker, who does not know them, renders any."""
        attack, settings = trial.attack, trial.settings
        if answer.features is None:
            return score_images(answer, truth, settings)
        cosines, owners = match_features(answer.features, self.victim.embed(truth.tensor, settings.device))
        start = time.perf_counter()
        if _renders(attack):
            chosen = sorted(range(len(owners)), key=lambda row: (owners[row] < 0, owners[row]))[: attack.images]
            rendering = Rendering(features=answer.features[chosen], inversion=attack.inversion, sized=attack.bias_scale)
            rendered = fp.run(rendering, trial.observed()[0], seed=settings.seed, device=settings.device)
            answer = dataclasses.replace(answer, inputs=rendered.inputs)
            owners = tuple(owners[row] for row in chosen)
        seconds = time.perf_counter() - start  # the result is on the CPU: a GPU has been waited for
        scores = score_images(*_ordered_by_features(answer, truth, owners), settings)
        values = {
            COSINE: float(cosines.mean()),
            MEDIAN_COSINE: float(cosines.median()),
            CLOSE: float((cosines > CLOSE_COSINE).double().mean()),
            CONFIRMED: float(answer.diagnostics.get("confirmed") or 0) / len(cosines),
        }
        return Scores(values | scores.values, {"cosines": cosines, **scores.tensors}, seconds)

    def details(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, object]:
        cosines = [batch["cosines"] for batch in tensors if "cosines" in batch]
        return {COSINES: histogram(torch.cat(cosines)).tolist()} if cosines else {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Rendering(Attack):
    """The attack's last step: images with these features (images, features)."""

    features: Tensor
    inversion: FeatureInversion
    sized: bool
    """Whether the features' length is known."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"bounds", "normalization"})

    def run(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        layer = attacked_layer(network_map(observation), observation.rounds[0].update)
        assert layer is not None  # its inputs were recovered
        features = self.features.to(observation.rounds[0].params[layer.weight])
        images = images_with(observation, layer, features, self.inversion, rng, sized=self.sized)
        return fp.Reconstruction(inputs=images.inputs)


def _renders(attack: Attack) -> TypeGuard[CocktailParty]:
    return isinstance(attack, CocktailParty) and bool(attack.images) and not attack.matching


def match_features(recovered: Tensor, truth: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each true row's |cosine| to the recovered one assigned to it, or 0; the sample of each recovered row, or -1."""
    ours, theirs = (torch.nn.functional.normalize(x.double().flatten(1), dim=1) for x in (recovered, truth))
    similarity = (ours @ theirs.T).abs()
    rows, samples = linear_sum_assignment(similarity.numpy(), maximize=True)
    cosines = torch.zeros(len(truth), dtype=torch.float64)
    cosines[samples] = similarity[rows, samples]
    owner = dict(zip(rows.tolist(), samples.tolist(), strict=True))
    return cosines, tuple(owner.get(row, -1) for row in range(len(recovered)))


def histogram(cosines: Tensor) -> Tensor:
    """How many lie in each of equal steps from 0 to 1."""
    return torch.histc(cosines.clamp(0, 1), bins=BINS, min=0.0, max=1.0).long()


def _ordered_by_features(
    answer: fp.Reconstruction, truth: fp.Truth, owners: tuple[int, ...]
) -> tuple[fp.Reconstruction, fp.Truth]:
    """The images, rendered from the first `owners` features, and the samples these belong to, in one order."""
    # Sixteen images would find flattering partners among a thousand samples by their pixels.
    if answer.inputs is None:
        return answer, truth
    pairs = sorted((owner, image) for image, owner in enumerate(owners[: len(answer.inputs)]) if owner >= 0)
    samples, images = [sample for sample, _ in pairs], [image for _, image in pairs]
    ambiguity = answer.ambiguity - {"order"}
    ordered = dataclasses.replace(answer, inputs=answer.tensor[images], labels=None, ambiguity=ambiguity)
    return ordered, samples_of(truth, samples)
