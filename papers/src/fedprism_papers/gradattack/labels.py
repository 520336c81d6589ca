"""Private labels: given to the attacker, read off the update, or optimised along with the images.

Most published attacks are given the labels. Everything else is granted here (exact batch-norm statistics), so that a
drop is the labels' alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

import fedprism as fp
from fedprism.attacks import GradientMatching, Labels
from fedprism.errors import BadInput
from fedprism.randomness import generator
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared.base import Announce, Entry, Recipe, Row, Settings
from fedprism_papers.shared.measuring import LPIPS, PSNR

SIZES, QUICK_SIZES = (16,), (4,)  # images per batch
QUICK_ITERATIONS = 200  # of a quick attack
LABELS_RIGHT = "labels right"

KNOWN, INFERRED, JOINT = "labels known", "labels inferred", "labels optimised jointly"
METHODS = {KNOWN: Labels.KNOWN, INFERRED: Labels.INFERRED, JOINT: Labels.JOINT}
EVEN, AS_DRAWN, ONE_CLASS = "as even as can be", "as drawn", "all of one class"
BATCHES = (EVEN, AS_DRAWN, ONE_CLASS)

WHO = (
    f"{KNOWN}: the attacker is given them. {INFERRED}: it counts them from the gradient of the last layer's bias. "
    f"{JOINT}: they start as noise and are optimised with the images, as published. All three are given the exact "
    f"batch-norm statistics. {LABELS_RIGHT}: the fraction of labels that are right, in any order."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = inversion.data_of(settings)
    target: inversion.Target | None = None
    for size in settings.sizes_or(SIZES, QUICK_SIZES):
        for kind in BATCHES:
            if not settings.wants({"labels in the batch": kind, "n": size}):
                continue
            target, answers = (
                target or inversion.trained_target(data, settings, announce),
                dict[str, inversion.Answers](),
            )
            for name in METHODS:
                announce(f"{size} images, {kind}: {name}")
                answers[name] = observe(name, composed(kind, size, data, settings), target, settings)
            yield row(kind, size, answers, data, settings)


def observe(name: str, batches: Sequence[fp.Batch], target: inversion.Target, settings: Settings) -> inversion.Answers:
    """What one attacker makes of the batches."""
    threat = fp.threats.honest_but_curious.granting("batchnorm_exact")
    threat = threat.granting("labels") if name == KNOWN else threat
    return inversion.invert(attack(name, settings), target, batches, threat, settings)


def row(
    kind: str, size: int, answers: Mapping[str, inversion.Answers], data: inversion.Data, settings: Settings
) -> Row:
    """A row of the table: the same batches with labels known, inferred and optimised."""
    batches = composed(kind, size, data, settings)
    images = fp.Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "labels")))
    entries: dict[str, Entry] = {
        name: inversion.scored(
            answer,
            images,
            data.normalization,
            settings,
            method=attack(name, settings),
            further={LABELS_RIGHT: labels_right(answer, batches)},
        )
        for name, answer in answers.items()
    }
    entries[inversion.STRANGERS] = inversion.scored_strangers(data, images, size, settings)
    iterations = settings.iterations_or(inversion.ITERATIONS, QUICK_ITERATIONS)
    done = f"{iterations:,} iterations (the paper: {inversion.PAPER_ITERATIONS:,})"
    return Row(
        cell={"labels in the batch": kind, "n": size, "classes in it": len(set(batches[0].labels.tolist()))},
        entries=entries,
        notes=(inversion.effort(data, settings, done),),
    )


def attack(name: str, settings: Settings) -> GradientMatching:
    return inversion.exact_statistics(settings, QUICK_ITERATIONS, METHODS[name])


def composed(kind: str, size: int, data: inversion.Data, settings: Settings) -> list[fp.Batch]:
    return [compose(kind, size, data.train, settings.seed, number) for number in range(settings.batches_or(1))]


def compose(kind: str, size: int, images: fp.Batch, seed: int, number: int) -> fp.Batch:
    """A batch of training images whose labels are as told; `number` says which one."""
    shuffled = torch.randperm(len(images), generator=generator(seed, "composed", kind, number))
    if kind == AS_DRAWN:
        return images[shuffled[:size]]
    labels = images.labels[shuffled]
    if kind == ONE_CLASS:
        alike = shuffled[labels == labels[0]]
        if len(alike) < size:
            raise BadInput(
                f"{size} images of one class are needed, but there are {len(alike)}. Ask for smaller batches."
            )
        return images[alike[:size]]
    return images[shuffled[_occurrence(labels).argsort(stable=True)[:size]]]


def _occurrence(labels: Tensor) -> Tensor:
    """(count,) how many of the same class come before each: the first of every class, then the second, and so on."""
    before = torch.zeros_like(labels)
    for number in range(int(labels.max()) + 1):
        members = labels == number
        before[members] = torch.arange(int(members.sum()))
    return before


def labels_right(answers: inversion.Answers, batches: Sequence[fp.Batch]) -> float:
    """The fraction of all labels that an answer has as often as its batch does."""
    right = (
        in_common(answer.labels, batch.labels)
        for answer, batch in zip(answers.parts, batches, strict=True)
        if answer.labels is not None
    )
    return sum(right) / sum(len(batch) for batch in batches)


def in_common(answered: Tensor, labels: Tensor) -> int:
    """How many labels of a batch are among those answered, each counted as often as both have it."""
    return (Counter(answered.tolist()) & Counter(labels.tolist())).total()


RECIPE = Recipe(
    name="gradattack-labels",
    summary="What private labels are worth to the attacker: known, inferred or optimised jointly",
    citation=f"{inversion.CITATION}, section on private labels; a study in its form",
    shown=(LPIPS, PSNR, LABELS_RIGHT),
    run=run,
    options=("sizes", "batches", "iterations", "only"),
    notes=(WHO, inversion.NULL, inversion.LPIPS_NOTE, inversion.ROUNDING),
)
