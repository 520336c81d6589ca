"""The malicious server of MKOR's recipes: victims, what it sees of parameters it chose, and scores class by class.

Wang, Velipasalar, Gursoy, "Maximum Knowledge Orthogonality Reconstruction with Gradients in Federated Learning", WACV
2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import fedprism as fp
from fedprism.attacks import (
    Attack,
    ClassFishing,
    GradientMatching,
    Labels,
    Mkor,
    Reference,
    Smoothest,
    TotalVariation,
    interpolated_midpoint,
    midpoint,
    softened_midpoint,
)
from fedprism.defenses import Context, GaussianNoise
from fedprism.metrics import psnr, ssim
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.cells import Attacked, AttackTrial
from fedprism_papers.shared.measuring import ANSWERED, PSNR, SHOWN_IMAGES, Scores, samples_of
from fedprism_papers.shared.victims import equal_parts

CITATION = "Wang, Velipasalar, Gursoy, Maximum Knowledge Orthogonality Reconstruction, 2024"
SSIM, BEST_SSIM, BEST_PSNR, ALONE = "SSIM", "best SSIM", "best PSNR", "alone"
SHOWN = (BEST_SSIM, SSIM, BEST_PSNR, PSNR, ANSWERED)
ORDER = "best SSIM, average SSIM, best PSNR, average PSNR"

DUMP, INTERPOLATED, SOFTENED = "midpoint", "midpoint, interpolated", "midpoint, softened"
SMOOTH, SPARE = "smoothest", "spare channels, smoothest"
SMOOTHED, QUICK_SMOOTHED = 100, 30  # iterations of the smoothest decoder, unless told otherwise
INVERTING, FISHING = "inverting gradients", "class fishing"
VARIATION = 0.1
"""The weight of total variation in the published code of inverting gradients, called as a library."""
FISHED = "Class fishing answers for the samples of class 0 alone."
EQUAL, NODES = "equal logits, midpoint", "several nodes, smoothest"
SCORED = (
    "An answer is compared with the private images of the class it is for, the best one-to-one among several; averages "
    f"are over the answered images; '{ANSWERED}': the fraction of these; '{ALONE}': the fraction of answers that are "
    "one sample's."
)
LOSS = (
    "Clients train with cross-entropy, for which the paper's code does not work: it leaves the softmax out. One class "
    "takes all the probability instead, and cannot be read. With equal logits a class has to be absent, which none is "
    "from a batch of all of them; with several nodes a class all can be read."
)
DECODERS = (
    f"'{DUMP}': the middle of the tightest bounds, as the paper says. '{INTERPOLATED}': between the centres of the "
    f"lattice's cells by cubic interpolation, within the bounds. '{SOFTENED}': followed by means of 5 x 5, as the "
    f"paper's code does. '{SMOOTH}': the smoothest image with the same maxima and minima in all windows. '{SPARE}': "
    "those of the blurred grey image too, which channels carry that the paper leaves unused."
)
POOLLESS = "two convolutions, one dense layer"
POOLLESS_NOTE = (
    f"'{POOLLESS}': the paper calls it a modified network, with strides in place of pools; its code has neither, and a "
    "dense layer of all pixels, which gives every image away by its construction. That layer is the last one, so that "
    "the dump class's row is the sum of all images, and noise as large as a part of the tensor's standard deviation is "
    "a part of that sum; equal logits have no such row."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Victim:
    """A network and the images its clients hold, enlarged to `side`. `client_images`: how many one client takes."""

    name: str
    model: nn.Module
    images: fp.data.ImageSet
    side: int
    note: str
    client_images: int | None = None

    def draw(self, size: int, rng: torch.Generator, *, unique: bool) -> fp.Batch:
        batch = self.images.draw(min(size, self.images.classes if unique else size), rng, unique_labels=unique)
        inputs = batch.tensor
        if inputs.shape[2] != self.side:
            inputs = interpolate(inputs, size=self.side, mode="bilinear", align_corners=False).clamp(0, 1)
        return fp.Batch(inputs, batch.labels)


@dataclass(frozen=True, kw_only=True)
class ChosenParameters(Attacked):
    """Batches of a victim, and noise on every entry of the update (`noised`)."""

    victim: Victim
    size: int
    batches: int
    unique: bool = True
    noise: float = 0.0
    scenario: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, number: int, settings: Settings) -> fp.Batch:
        rng = generator(settings.seed, "mkor", self.victim.name, self.size, self.unique, number)
        return self.victim.draw(self.size, rng, unique=self.unique)

    def sent(self, attack: Attack) -> str:
        if isinstance(attack, Mkor):
            return repr(replace(attack, decoder=midpoint))
        return repr(attack) if hasattr(attack, "tamper") else "honest"

    def observe(self, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, fp.Truth]:
        """Of parameters that the attack chose, if it is one that does."""
        clients = equal_parts(self.batch(number, settings), self.victim.client_images)
        scenario = fp.Scenario(model=self.victim.model, clients=clients, **self.scenario)
        server: Any = attack if hasattr(attack, "tamper") else None
        # The runner hands labels to attacks that ask for them alone: DLG and iDLG do not.
        curious = fp.threats.honest_but_curious.granting("labels")
        threat = fp.threats.malicious_server if server is not None else curious
        if len(clients) > 1:
            threat = replace(threat, sees="aggregate")
        seed = settings.seed + number
        observation, truth = fp.simulate(scenario, threat, seed=seed, server=server, device=settings.device)
        if self.noise:
            observation = noised(observation, self.noise, generator(seed, "noise"))
        return observation, truth

    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: fp.Truth) -> Scores:
        ours, theirs, rows = by_class(answer, truth) if isinstance(trial.attack, Mkor) else assigned(answer, truth)
        values = {ANSWERED: len(ours) / len(truth.inputs)}
        if len(ours):
            place = devices.pick(trial.settings.device)
            decibels, similar = (metric(ours.to(place), theirs.to(place)) for metric in (psnr, ssim))
            values |= {PSNR: float(decibels.mean()), BEST_PSNR: float(decibels.max())}
            values |= {SSIM: float(similar.mean()), BEST_SSIM: float(similar.max())}
        counts = answer.diagnostics.get("counts")
        if counts:
            values[ALONE] = sum(count == 1 for count in counts) / len(truth.inputs)
        recovered = torch.zeros_like(truth.tensor)
        recovered[rows] = ours.to(recovered)
        return Scores(values, {"originals": truth.tensor[:SHOWN_IMAGES], "recovered": recovered[:SHOWN_IMAGES]})


def noised(observation: fp.Observation, noise: float, rng: torch.Generator) -> fp.Observation:
    """The update with Gaussian noise on it, be it of one client or of several."""
    sent = observation.rounds[0]
    update = GaussianNoise(relative=noise).on_update(sent.update, Context(), rng)
    return replace(observation, rounds=(replace(sent, update=update),))


def assigned(answer: fp.Reconstruction, truth: fp.Truth) -> tuple[Tensor, Tensor, list[int]]:
    """Answers beside the private images they are assigned to, and which of all these are."""
    if answer.inputs is None or not len(answer.inputs):
        return truth.tensor[:0], truth.tensor[:0], []
    matched = fp.match(answer, truth)
    rows = [number for number, row in enumerate(matched.rows) if row is not None]
    return matched.recovered[rows], matched.truth[rows], rows


def by_class(answer: fp.Reconstruction, truth: fp.Truth) -> tuple[Tensor, Tensor, list[int]]:
    """The same, but each answer only with images of its own class: it says for which class it is."""
    assert answer.labels is not None
    ours, theirs, rows = [truth.tensor[:0]], [truth.tensor[:0]], list[int]()
    for label in sorted(set(answer.labels.tolist())):
        members = (truth.labels == label).nonzero().flatten()
        if len(members):
            of_class = replace(answer, inputs=answer.tensor[answer.labels == label])
            image, original, chosen = assigned(of_class, samples_of(truth, members.tolist()))
            ours.append(image)
            theirs.append(original)
            rows += members[chosen].tolist()
    return torch.cat(ours), torch.cat(theirs), rows


def decoders(nodes: int, settings: Settings, middle: float = 0.0) -> dict[str, Attack]:
    """MKOR with a dump class and five ways to decode, with equal logits, and with several nodes a class."""
    smooth = smoothest(settings, middle)
    return {
        DUMP: Mkor(reference=Reference.DUMP_CLASS),
        INTERPOLATED: Mkor(reference=Reference.DUMP_CLASS, decoder=interpolated_midpoint),
        SOFTENED: Mkor(reference=Reference.DUMP_CLASS, decoder=softened_midpoint),
        SMOOTH: Mkor(reference=Reference.DUMP_CLASS, decoder=smooth),
        SPARE: Mkor(reference=Reference.DUMP_CLASS, blurred=True, decoder=replace(smooth, middle=0.0)),
        EQUAL: Mkor(),
        NODES: Mkor(nodes=nodes, decoder=smooth),
    }


def smoothest(settings: Settings, middle: float = 0.0) -> Smoothest:
    return Smoothest(iterations=settings.iterations_or(SMOOTHED, QUICK_SMOOTHED), middle=middle)


def only_midpoint() -> dict[str, Attack]:
    """For networks without windows, in which every decoder answers with the pixels themselves."""
    return {DUMP: Mkor(reference=Reference.DUMP_CLASS), EQUAL: Mkor()}


def gradient_matching(iterations: int) -> dict[str, Attack]:
    """The paper's two baselines of table 3, each with so many iterations."""
    inverting = replace(fp.attacks.inverting_gradients(), iterations=iterations, labels=Labels.KNOWN)
    fishing = ClassFishing()
    assert isinstance(fishing.matching, GradientMatching)
    return {
        INVERTING: replace(inverting, priors=(TotalVariation(VARIATION),)),
        FISHING: replace(fishing, matching=replace(fishing.matching, iterations=iterations)),
    }


def poolless(victim: Victim, settings: Settings) -> Victim:
    """The same images through what the paper's code has for its "modified network": nothing is lost on the way."""
    classes, colours = victim.images.classes, victim.images.images.shape[1]
    with seeded_layers(generator(settings.seed, "no pools")):
        model = nn.Sequential(
            *(nn.Conv2d(colours, colours, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(colours, colours, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(colours * victim.side**2, classes)),
        )
    return replace(victim, model=model, note=POOLLESS_NOTE)


def small_chain(settings: Settings) -> Victim:
    """The quick stand-in for VGG-16: four convolutions with pools and three dense layers, on enlarged photographs."""
    images = fp.data.load("photos", size=16, crops=16)
    with seeded_layers(generator(settings.seed, "network")):
        layers: list[nn.Module] = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU()]
        for before, after in ((12, 12), (12, 32), (32, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(128 * 64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)]
    note = f"Quick: four convolutions, {len(images)} crops of the embedded photographs, enlarged from 16 to 64 pixels."
    return Victim(name="photos", model=nn.Sequential(*layers), images=images, side=64, note=note)
