"""Figure 1: what batch-norm statistics are worth to the attacker, on a batch of small images and on one photograph.

Each attacker looks for the weights of its priors (of total variation, and of the pull towards the statistics it has) in
a rehearsal: it plays the client itself with images of its own, and keeps the weights with which it recovers those best.
The published weights are tried first and are shown beside the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

import fedprism as fp
from fedprism import utility
from fedprism.attacks import GradientMatching, Labels, Pull, bn_exact, bn_infer, bn_proxy
from fedprism.pixels import to_inputs
from fedprism.solvers import TotalVariation
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared import training, tuning
from fedprism_papers.shared.base import Announce, Entry, Recipe, Row, Settings
from fedprism_papers.shared.measuring import LPIPS, PSNR
from fedprism_papers.shared.tuning import Range, Tuning
from fedprism_papers.shared.victims import IMAGENET

SIZES, QUICK_SIZES = (16,), (4,)  # images per batch
QUICK_ITERATIONS = 120  # of a quick attack
TRIALS, QUICK_TRIALS = 12, 4  # rehearsals of one search for weights
REHEARSED = 5
"""How many times fewer iterations a rehearsal has."""
SIDE, CROPS, PHOTO_EPOCHS, PHOTO_BATCH = 224, 24, 4, 16  # pixels, crops per photograph, of the training on photographs
PHOTOGRAPH, OWN_PHOTOGRAPH = 1, 2
"""Numbers of the attacked photograph, a cat, and of the attacker's own, a cup of coffee."""

KNOWLEDGE: dict[str, Callable[[], GradientMatching]] = {"exact": bn_exact, "infer": bn_infer, "proxy": bn_proxy}
TV, BN = "alpha TV", "alpha BN"
SPACE = {TV: Range(1e-3, 0.5), BN: Range(1e-4, 0.1)}
PUBLISHED_WEIGHTS = {TV: 0.05, BN: 1e-3}
THREAT = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact", "batchnorm_running")
"""Of what is granted, each attack is handed what its preset declares."""
PUBLISHED, CHOSEN = "published weights", "chosen weights"

WHO = (
    "exact: the guess keeps its own statistics, pulled towards those of the private batch, which are given. infer: "
    "pulled towards the running ones. proxy: normalised by the running ones. Labels are given to all three."
)
SEARCH = (
    f"{CHOSEN}: {TV} and {BN} by Optuna's TPE in a rehearsal, on images of the attacker's own that are not attacked; "
    f"the published {PUBLISHED_WEIGHTS[TV]:g} and {PUBLISHED_WEIGHTS[BN]:g} are tried first. The attacked images play "
    "no part in it."
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Whom the attacker is after (`images`, in batches of `size`), and what it rehearses with."""

    name: str
    target: Callable[[], inversion.Target]
    """The attacked network, trained when it is first asked for."""
    images: fp.Batch
    rehearsed: fp.Batch
    others: fp.Batch
    size: int
    note: str


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for make in (partial(low_resolution, inversion.data_of(settings)), photograph):
        for scene in make(settings):
            for knowledge in KNOWLEDGE:
                if settings.wants({"images": scene.name, "n": scene.size, "batch norm": knowledge}):
                    yield row(scene, knowledge, settings, announce)


def low_resolution(data: inversion.Data, settings: Settings) -> list[Scene]:
    """Batches of small images, of the first of each class; the attacker rehearses with test images."""
    target = cache(
        lambda: inversion.Target(model=inversion.attacked_network(data, settings), normalization=data.normalization)
    )
    note = f"{data.name}: the network is trained for {data.attacked_epochs} epochs on {len(data.train):,} images."
    return [
        Scene(
            name=data.name,
            target=target,
            images=data.first(size * settings.batches_or(1)),
            rehearsed=data.test[:size],
            others=data.test[size : size + size * settings.batches_or(1)],
            size=size,
            note=note,
        )
        for size in settings.sizes_or(SIZES, QUICK_SIZES)
    ]


def photograph(settings: Settings) -> list[Scene]:
    """One photograph as a whole; the network has learned to tell crops of eight photographs apart."""
    side = inversion.QUICK_SIDE if settings.quick else SIDE
    images = fp.data.load("photos", size=side, crops=CROPS)
    everything = images.batch(torch.arange(len(images)))
    everything = fp.Batch(to_inputs(everything.tensor, IMAGENET), everything.labels)
    train = everything[images.classes :]  # but for the first of each class: the photographs as a whole
    make = inversion.small_network if settings.quick else partial(fp.models.build, "resnet18")
    model = make(classes=images.classes, seed=settings.seed)
    schedule = utility.Schedule(epochs=PHOTO_EPOCHS, batch_size=PHOTO_BATCH, lr=0.01, augment=training.shifted)

    def target() -> inversion.Target:
        trained = utility.fit(model, train, None, schedule, seed=settings.seed, device=settings.device)
        return inversion.Target(model=trained.cpu(), normalization=IMAGENET)

    return [
        Scene(
            name=f"photograph of {side} px",
            target=cache(target),
            images=everything[PHOTOGRAPH : PHOTOGRAPH + 1],
            rehearsed=everything[OWN_PHOTOGRAPH : OWN_PHOTOGRAPH + 1],
            others=everything[OWN_PHOTOGRAPH + 1 : OWN_PHOTOGRAPH + 2],
            size=1,
            note=(
                f"{side} px: one of eight embedded photographs; the network is trained for {PHOTO_EPOCHS} "
                f"epochs on {len(train):,} crops of them (the paper: an ImageNet photograph, and a network trained on "
                "ImageNet)."
            ),
        )
    ]


def row(scene: Scene, knowledge: str, settings: Settings, announce: Announce) -> Row:
    """One attacker with this knowledge of batch norm: with the published weights and with those it chose."""
    title = f"{scene.name}, batch norm {knowledge}"
    announce(f"{title}: training the attacked network")
    scene.target()
    announce(f"{title}: looking for weights")
    chosen, entries = choose(scene, knowledge, settings).values, dict[str, Entry]()
    scored = partial(
        inversion.scored, images=scene.images, normalization=scene.target().normalization or IMAGENET, settings=settings
    )
    for name, weights in {PUBLISHED: PUBLISHED_WEIGHTS, CHOSEN: chosen}.items():
        announce(f"{title}: {name}")
        method = attack(knowledge, weights, iterations(settings))
        batches = inversion.in_batches(scene.images, scene.size)
        answers = inversion.invert(method, scene.target(), batches, THREAT, settings)
        entries[name] = scored(answers, method=method)
    strangers = scored(inversion.unattacked(scene.others.tensor, scene.size))
    return Row(
        cell={"images": scene.name, "n": scene.size, "batch norm": knowledge},
        entries={**entries, TV: chosen[TV], BN: chosen.get(BN), inversion.STRANGERS: strangers},
        notes=(scene.note, effort(settings)),
    )


def choose(scene: Scene, knowledge: str, settings: Settings) -> Tuning:
    """The weights with which this attacker best recovers images of its own."""
    wanted = {TV} if KNOWLEDGE[knowledge]().batchnorm.pull is Pull.NONE else {TV, BN}
    return tuning.tune(
        lambda weights: attack(knowledge, weights, rehearsed(settings)),
        {name: SPACE[name] for name in SPACE if name in wanted},
        scene.target().scenario(scene.rehearsed),
        THREAT,
        first={name: PUBLISHED_WEIGHTS[name] for name in wanted},
        trials=searched(settings),
        seed=settings.seed,
        device=settings.device,
    )


def attack(knowledge: str, weights: Mapping[str, float], steps: int) -> GradientMatching:
    preset = KNOWLEDGE[knowledge]()
    batchnorm = replace(preset.batchnorm, pull_weight=weights.get(BN, preset.batchnorm.pull_weight))
    priors = (TotalVariation(weights[TV]),)
    return replace(
        preset, labels=Labels.KNOWN, priors=priors, batchnorm=batchnorm, iterations=steps, engine=inversion.ENGINE
    )


def iterations(settings: Settings) -> int:
    return settings.iterations_or(inversion.ITERATIONS, QUICK_ITERATIONS)


def searched(settings: Settings) -> int:
    return settings.tune or (QUICK_TRIALS if settings.quick else TRIALS)


def rehearsed(settings: Settings) -> int:
    return max(1, iterations(settings) // REHEARSED)


def effort(settings: Settings) -> str:
    return (
        f"{iterations(settings):,} iterations (the paper: {inversion.PAPER_ITERATIONS:,}); the search tries "
        f"{searched(settings)} weights in rehearsals of {rehearsed(settings):,} iterations."
    )


RECIPE = Recipe(
    name="gradattack-fig-1",
    summary="What leaks with exact, inferred and running batch-norm statistics, and the weights an attacker chooses",
    citation=f"{inversion.CITATION}, figure 1",
    shown=(LPIPS, PSNR),
    run=run,
    options=("sizes", "batches", "iterations", "tune", "only"),
    notes=(WHO, SEARCH, inversion.NULL, inversion.LPIPS_NOTE, inversion.ROUNDING),
)
