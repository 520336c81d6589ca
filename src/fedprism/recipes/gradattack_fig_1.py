"""Figure 1: what batch-norm statistics are worth to the attacker, on a batch of small images and on one photograph.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.

Each attacker looks for the weights of its priors (of total variation, and of the pull towards the statistics it has) in
a rehearsal: it plays the client itself with images of its own, and keeps the weights with which it recovers those best.
The published weights are tried first and are shown beside the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import fedprism as fp
from fedprism import tuning, utility
from fedprism.attacks import GradientMatching, Labels, Pull, bn_exact, bn_infer, bn_proxy
from fedprism.recipes import training
from fedprism.recipes.base import Announce, Entry, Outcome, Recipe, Row, Settings
from fedprism.recipes.gradattack import (
    CITATION,
    ENGINE,
    ITERATIONS,
    LPIPS_NOTE,
    NARROW,
    NULL,
    PAPER_ITERATIONS,
    QUICK_SIDE,
    ROUNDING,
    STRANGERS,
    Answers,
    Data,
    Target,
    attacked_network,
    data_of,
    in_batches,
    invert,
    scored,
    small_network,
    unattacked,
)
from fedprism.recipes.measuring import LPIPS, PSNR
from fedprism.recipes.sheets import contact_sheet
from fedprism.recipes.victims import IMAGENET
from fedprism.solvers import TotalVariation
from fedprism.tuning import Range, Tuning

SIZES, QUICK_SIZES = (16,), (4,)
QUICK_ITERATIONS = 120
TRIALS, QUICK_TRIALS = 12, 4
REHEARSED = 5
"""How many times fewer iterations a rehearsal has."""
SIDE, CROPS, PHOTO_EPOCHS, PHOTO_BATCH = 224, 24, 4, 16
PHOTOGRAPH, OWN_PHOTOGRAPH = 1, 2
"""Numbers of the attacked photograph, a cat, and of the attacker's own, a cup of coffee."""

KNOWLEDGE: dict[str, Callable[[], GradientMatching]] = {"exact": bn_exact, "infer": bn_infer, "proxy": bn_proxy}
TV, BN = "alpha TV", "alpha BN"
SPACE = {TV: Range(1e-3, 0.5), BN: Range(1e-4, 0.1)}
PUBLISHED_WEIGHTS = {TV: 0.05, BN: 1e-3}
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
    """Whom the attacker is after (`images`, in batches of `size`), and what it rehearses with (`own`)."""

    name: str
    target: Target
    images: fp.Batch
    own: fp.Batch
    others: fp.Batch
    size: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an attacker chose, and what came back with the published and with the chosen weights."""

    found: Tuning
    answers: Mapping[str, Answers]


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for make in (partial(low_resolution, data_of(settings)), photograph):
        announce("training the attacked network")
        for scene in make(settings):
            for knowledge in KNOWLEDGE:
                yield row(scene, knowledge, observe(scene, knowledge, settings, announce), settings)


def low_resolution(data: Data, settings: Settings) -> list[Scene]:
    """Batches of small images, of the first of each class; the attacker rehearses with test images."""
    target = Target(model=attacked_network(data, settings), normalization=data.normalization)
    scenes = []
    for size in settings.sizes_or(SIZES, QUICK_SIZES):
        count = size * settings.batches_or(1)
        scenes.append(
            Scene(
                name=data.name,
                target=target,
                images=data.first(count),
                own=data.test[:size],
                others=data.test[size : size + count],
                size=size,
                note=(
                    f"{data.name}: the network is trained for {data.attacked_epochs} epochs on {len(data.train):,} "
                    "images."
                ),
            )
        )
    return scenes


def photograph(settings: Settings) -> list[Scene]:
    """One photograph as a whole; the network has learned to tell crops of eight photographs apart."""
    side = QUICK_SIDE if settings.quick else SIDE
    images = fp.data.load("photos", size=side, crops=CROPS)
    everything = images.batch(torch.arange(len(images)))
    everything = fp.Batch(training.normalised(everything.inputs, IMAGENET), everything.labels)
    train = everything[images.classes :]  # but for the first of each class: the photographs as a whole
    model = photograph_network(images.classes, settings)
    schedule = utility.Schedule(epochs=PHOTO_EPOCHS, batch_size=PHOTO_BATCH, lr=0.01, augment=training.shifted)
    model = utility.fit(model, train, None, schedule, seed=settings.seed, device=settings.device).cpu()
    return [
        Scene(
            name=f"photograph of {side} px",
            target=Target(model=model, normalization=IMAGENET),
            images=everything[PHOTOGRAPH : PHOTOGRAPH + 1],
            own=everything[OWN_PHOTOGRAPH : OWN_PHOTOGRAPH + 1],
            others=everything[OWN_PHOTOGRAPH + 1 : OWN_PHOTOGRAPH + 2],
            size=1,
            note=(
                f"{side} px: one of eight embedded photographs; the network"
                f"{', with a quarter of its channels,' if settings.narrow else ''} is trained for {PHOTO_EPOCHS} "
                f"epochs on {len(train):,} crops of them (the paper: an ImageNet photograph, and a network trained on "
                "ImageNet)."
            ),
        )
    ]


def photograph_network(classes: int, settings: Settings) -> nn.Module:
    if settings.quick:
        return small_network(classes, settings.seed)
    channels = {"width": NARROW} if settings.narrow else {}
    return fp.models.build("resnet18", classes=classes, seed=settings.seed, **channels)


def observe(scene: Scene, knowledge: str, settings: Settings, announce: Announce) -> Attempt:
    """What an attacker with this knowledge of batch norm makes of the scene."""
    title = f"{scene.name}, batch norm {knowledge}"
    announce(f"{title}: looking for weights")
    found, answers = choose(scene, knowledge, settings), dict[str, Answers]()
    for name, weights in {PUBLISHED: PUBLISHED_WEIGHTS, CHOSEN: found.values}.items():
        announce(f"{title}: {name}")
        method = attack(knowledge, weights, iterations(settings))
        answers[name] = invert(method, scene.target, in_batches(scene.images, scene.size), threat(), settings)
    return Attempt(found=found, answers=answers)


def row(scene: Scene, knowledge: str, attempt: Attempt, settings: Settings) -> Row:
    """A row of the table: one attacker, with the weights it tried and those that it chose."""
    weights = {PUBLISHED: PUBLISHED_WEIGHTS, CHOSEN: attempt.found.values}
    entries: dict[str, Entry] = {
        name: outcome(scene, answers, settings, attack(knowledge, weights[name], iterations(settings)))
        for name, answers in attempt.answers.items()
    }
    picture, caption = contact_sheet(entries)
    return Row(
        cell={"images": scene.name, "n": scene.size, "batch norm": knowledge},
        entries={
            **entries,
            TV: attempt.found.values[TV],
            BN: attempt.found.values.get(BN),
            STRANGERS: outcome(scene, unattacked(scene.others.inputs, scene.size), settings),
        },
        notes=(scene.note, effort(settings)),
        picture=picture,
        caption=caption,
    )


def choose(scene: Scene, knowledge: str, settings: Settings) -> Tuning:
    """The weights with which this attacker best recovers images of its own."""
    wanted = {TV} if KNOWLEDGE[knowledge]().pull is Pull.NONE else {TV, BN}
    return tuning.tune(
        lambda weights: attack(knowledge, weights, rehearsed(settings)),
        {name: SPACE[name] for name in SPACE if name in wanted},
        scene.target.scenario(scene.own),
        threat(),
        first={name: PUBLISHED_WEIGHTS[name] for name in wanted},
        trials=QUICK_TRIALS if settings.quick else TRIALS,
        seed=settings.seed,
        device=settings.device,
    )


def attack(knowledge: str, weights: Mapping[str, float], steps: int) -> GradientMatching:
    preset = KNOWLEDGE[knowledge]()
    pull_weight = weights.get(BN, preset.pull_weight)
    priors = (TotalVariation(weights[TV]),)
    return replace(preset, labels=Labels.KNOWN, priors=priors, pull_weight=pull_weight, iterations=steps, engine=ENGINE)


def threat() -> fp.ThreatModel:
    """Of what is granted, each attack is handed what its preset declares."""
    return fp.threats.honest_but_curious.granting("labels", "batchnorm_exact", "batchnorm_running")


def iterations(settings: Settings) -> int:
    return settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)


def rehearsed(settings: Settings) -> int:
    return max(1, iterations(settings) // REHEARSED)


def outcome(scene: Scene, answers: Answers, settings: Settings, method: GradientMatching | None = None) -> Outcome:
    return scored(answers, scene.images, scene.target.normalization or IMAGENET, settings, method=method)


def effort(settings: Settings) -> str:
    return (
        f"{iterations(settings):,} iterations (the paper: {PAPER_ITERATIONS:,}); the search tries "
        f"{QUICK_TRIALS if settings.quick else TRIALS} weights in rehearsals of {rehearsed(settings):,} iterations."
    )


RECIPE = Recipe(
    name="gradattack-fig-1",
    summary="What leaks with exact, inferred and running batch-norm statistics, and the weights an attacker chooses",
    citation=f"{CITATION}, figure 1",
    shown=(LPIPS, PSNR),
    run=run,
    notes=(WHO, SEARCH, NULL, LPIPS_NOTE, ROUNDING),
    narrow=True,
)
