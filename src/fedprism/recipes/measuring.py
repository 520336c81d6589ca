"""What a method makes of one batch of a cell: clients answer, the method runs, and what it found is scored."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import fedprism as fp
from fedprism import devices
from fedprism.attacks import Attack, CocktailParty
from fedprism.attacks.cocktail_party import attacked_layer, images_with
from fedprism.attacks.structure import trace
from fedprism.client import Protocol
from fedprism.defenses import Defense
from fedprism.errors import BadInput
from fedprism.metrics import LpipsUnavailable, lpips, psnr
from fedprism.randomness import generator
from fedprism.recipes.base import Outcome, Settings
from fedprism.recipes.victims import Victim
from fedprism.solvers import FeatureInversion

LPIPS, PSNR, FAITHFUL = "LPIPS", "PSNR", "over 40 dB"
COSINE, MEDIAN_COSINE, CLOSE = "cosine", "median cosine", "over 0.9"
FAITHFUL_PSNR, CLOSE_COSINE = 40.0, 0.9
BINS = 20
SHOWN_IMAGES = 8
OUT_OF_MEMORY = "out of memory"
NOT_APPLICABLE = "does not apply"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is attacked: `batches` batches of `size` images of a victim, and what its clients do with them."""

    victim: Victim
    size: int
    batches: int
    protocol: Protocol = dataclasses.field(default_factory=fp.FedSGD)
    defense: Defense = dataclasses.field(default_factory=fp.chain)

    def observe(self, number: int, settings: Settings) -> tuple[fp.Observation, fp.Truth]:
        """What the server sees of batch `number`: one client's answer, or the sum where one client cannot hold it."""
        rng = generator(settings.seed, "batch", self.victim.name, self.size, number)
        clients = self.victim.clients(self.victim.draw(self.size, rng))
        scenario = fp.Scenario(
            model=self.victim.model,
            clients=clients,
            protocol=self.protocol,
            defense=self.defense,
            normalization=self.victim.normalization,
        )
        threat = fp.threats.honest_but_curious if len(clients) == 1 else fp.threats.secure_aggregation
        return fp.simulate(scenario, threat, seed=settings.seed + number, device=settings.device)


class _Place(TypedDict):
    seed: int
    device: str | None


class Run(NamedTuple):
    values: dict[str, float]
    seconds: float
    status: str
    pictures: tuple[Tensor, Tensor] | None
    cosines: Tensor | None
    """(samples,) between true and recovered features, where the attack recovers features"""


@dataclass(frozen=True, kw_only=True, repr=False)
class _Render(Attack):
    """The last step of the Cocktail Party Attack, images from features, for chosen samples."""

    features: Tensor
    inversion: FeatureInversion
    sized: bool

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"bounds", "normalization"})

    def run(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        layer = attacked_layer(trace(observation))
        assert layer is not None  # its inputs were found
        features = self.features.to(observation.rounds[0].params[layer.weight])
        found = images_with(observation, layer, features, self.inversion, rng, sized=self.sized)
        return fp.Reconstruction(inputs=found.inputs)


def run(victim: Victim, attack: Attack, observation: fp.Observation, truth: fp.Truth, settings: Settings) -> Run:
    """Of a batch of which only some images are to be rendered, every method renders the same: the batch's first ones.

    Which these are an attacker does not know, and need not: it renders any, or all.
    """
    place: _Place = {"seed": settings.seed, "device": settings.device}
    renders = attack if isinstance(attack, CocktailParty) and attack.images and not attack.matching else None
    start = time.perf_counter()
    found = fp.run(attack if renders is None else dataclasses.replace(renders, images=0), observation, **place)
    seconds = time.perf_counter() - start  # the result lies on the CPU: a GPU has been waited for
    values: dict[str, float] = {}
    cosines = None
    if found.features is not None:
        cosines, owners = match_features(found.features, victim.embed(truth.inputs, settings.device))
        values = {
            COSINE: float(cosines.mean()),
            MEDIAN_COSINE: float(cosines.median()),
            CLOSE: float((cosines > CLOSE_COSINE).double().mean()),
        }
        if renders is not None:
            start = time.perf_counter()
            chosen = sorted(range(len(owners)), key=lambda row: (owners[row] < 0, owners[row]))[: renders.images]
            features = found.features[chosen]
            render = _Render(features=features, inversion=renders.inversion, sized=renders.bias_scale)
            found = dataclasses.replace(found, inputs=fp.run(render, observation, **place).inputs)
            owners = tuple(owners[row] for row in chosen)
            seconds += time.perf_counter() - start
        found, truth = _ordered_by_features(found, truth, owners)
    scores, pictures = score_images(found, truth, settings)
    return Run(values | scores, seconds, str(found.status), pictures, cosines)


def outcome(attack: Attack, runs: list[Run]) -> Outcome:
    metrics = dict.fromkeys(metric for run in runs for metric in run.values)
    cosines = [run.cosines for run in runs if run.cosines is not None]
    return Outcome(
        values={metric: tuple(run.values[metric] for run in runs) for metric in metrics},
        seconds=tuple(run.seconds for run in runs),
        statuses=tuple(run.status for run in runs),
        settings=repr(attack),
        details={"cosines from 0 to 1": histogram(torch.cat(cosines)).tolist()} if cosines else {},
        pictures=runs[0].pictures if runs else None,
    )


def score_images(
    found: fp.Reconstruction, truth: fp.Truth, settings: Settings
) -> tuple[dict[str, float], tuple[Tensor, Tensor] | None]:
    """Means over the private images and the first few of them beside what came back.

    LPIPS and PSNR are over the images that were given an answer; `over 40 dB` is out of all of them.
    """
    if found.inputs is None or not len(found.inputs):
        return {}, None
    matched = fp.match(found, truth)
    answered = torch.tensor([row is not None for row in matched.rows])
    ours, theirs = matched.found[answered], matched.truth[answered]
    decibels = psnr(ours, theirs)
    values = {
        PSNR: float(decibels.mean()),
        FAITHFUL: float((decibels > FAITHFUL_PSNR).sum()) / len(answered),
        "answered": float(answered.float().mean()),
    }
    distance = mean_lpips(ours, theirs, settings)
    if distance is not None:
        values[LPIPS] = distance
    return values, (matched.truth[:SHOWN_IMAGES], matched.found[:SHOWN_IMAGES])


def mean_lpips(found: Tensor, truth: Tensor, settings: Settings) -> float | None:
    """Mean LPIPS (VGG), on the device; None in a quick run for which its network is not to be had."""
    folder = None if settings.data_dir is None else Path(settings.data_dir, "weights")
    place = devices.pick(settings.device)
    try:
        values = lpips(found.float().to(place), truth.float().to(place), net="vgg", weights_dir=folder)
    except LpipsUnavailable as reason:
        if not settings.quick:
            raise BadInput(str(reason)) from reason
        return None
    return float(values.mean())


def match_features(found: Tensor, truth: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The cosine of each true embedding to the recovered one it is assigned, whatever its sign, and whose that is.

    found (recovered, features), truth (samples, features). A sample that is left without a partner has cosine 0. The
    second answer names, for each recovered row, its sample, or -1.
    """
    ours, theirs = (torch.nn.functional.normalize(x.double().flatten(1), dim=1) for x in (found, truth))
    similarity = (ours @ theirs.T).abs()
    rows, samples = linear_sum_assignment(similarity.numpy(), maximize=True)
    cosines = torch.zeros(len(truth), dtype=torch.float64)
    cosines[samples] = similarity[rows, samples]
    owner = dict(zip(rows.tolist(), samples.tolist(), strict=True))
    return cosines, tuple(owner.get(row, -1) for row in range(len(found)))


def histogram(cosines: Tensor) -> Tensor:
    """How many lie in each of equal steps from 0 to 1."""
    return torch.histc(cosines.clamp(0, 1), bins=BINS, min=0.0, max=1.0).long()


def _ordered_by_features(
    found: fp.Reconstruction, truth: fp.Truth, owners: tuple[int, ...]
) -> tuple[fp.Reconstruction, fp.Truth]:
    """The images, rendered from the first `owners` features, and the samples these belong to, in one order.

    Sixteen images would find flattering partners among a thousand samples by their pixels; by their features each has
    one.
    """
    if found.inputs is None:
        return found, truth
    pairs = sorted((owner, image) for image, owner in enumerate(owners[: len(found.inputs)]) if owner >= 0)
    samples, images = [sample for sample, _ in pairs], [image for _, image in pairs]
    return (
        dataclasses.replace(found, inputs=found.inputs[images], labels=None, ambiguity=found.ambiguity - {"order"}),
        dataclasses.replace(
            truth,
            inputs=truth.inputs[samples],
            labels=truth.labels[samples],
            owners=tuple(truth.owners[sample] for sample in samples) if truth.owners else truth.owners,
        ),
    )
