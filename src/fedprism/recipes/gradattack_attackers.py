"""The attackers of table 2: who does not know the defense, and who does.

Both are given the labels and the batch-norm statistics of every batch. The naive one takes what it finds for the image.
The adaptive one goes on from there with pruning inside its own gradients, and keeps what explains the update better; of
mixed images it looks for the encodings of several epochs and solves for the images, told which were mixed and how.

Differs from the paper in: the paper's attacker decodes, and does not adapt to pruning; its decoding is by gradient
descent from zero, ours in closed form (MixUp) or by phase retrieval from several starts (InstaHide).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import Encodings, GradientMatching, Labels, bn_exact
from fedprism.defenses import Context, Defense, InstaHide, MixUp, Prune
from fedprism.defenses.mixup import Mixing
from fedprism.pixels import Normalization
from fedprism.randomness import generator
from fedprism.recipes.base import Outcome, Settings
from fedprism.recipes.gradattack import (
    ENGINE,
    ITERATIONS,
    Answers,
    Data,
    Target,
    in_batches,
    invert,
    scored,
)
from fedprism.solvers import TotalVariation

QUICK_ITERATIONS = 150
ENCODED, QUICK_ENCODED, PAPER_ENCODED = 4, 2, 20
"""For how many epochs the attacker collects encodings."""
RIDGE = 1e-3
"""Against the noise on recovered encodings, when they are decoded."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A defense with the paper's test accuracy and its average and best LPIPS for batches of 1, 16 and 32.

    variation: the weight of total variation, as published.
    """

    label: str
    paper_accuracy: float
    paper: tuple[tuple[float, float], ...]
    ratio: float | None = None
    mixing: MixUp | None = None
    variation: float = 0.05

    @property
    def on_gradients(self) -> Defense:
        return fp.chain() if self.ratio is None else Prune(self.ratio)

    @property
    def defense(self) -> Defense:
        return fp.chain(self.mixing or fp.chain(), self.on_gradients)


def method(case: Case, settings: Settings, *, adaptive: bool) -> GradientMatching:
    """The attack on one update."""
    signs = adaptive and isinstance(case.mixing, InstaHide)
    return replace(
        bn_exact(),
        labels=Labels.KNOWN,
        priors=(TotalVariation(case.variation, magnitude=signs),),
        iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS),
        adaptive=adaptive,
        engine=ENGINE,
    )


def epochs(case: Case, settings: Settings, *, adaptive: bool) -> int:
    """For how many epochs this attacker has to look at what the client sends."""
    if case.mixing is None or not adaptive:
        return 1
    return QUICK_ENCODED if settings.quick else ENCODED


def observe(
    case: Case,
    model: nn.Module,
    data: Data,
    images: fp.Batch,
    size: int,
    settings: Settings,
    *,
    adaptive: bool,
    epoch: int = 0,
    only: int | None = None,
) -> Answers:
    """What comes back of one epoch's gradients: the images, or their encodings, batch by batch or of one batch only."""
    if case.mixing is not None:
        images, _ = encode(case.mixing, images, model, settings.seed, epoch)
    target = Target(model=model, defense=case.on_gradients, normalization=data.normalization)
    if isinstance(case.mixing, InstaHide):  # encodings are of either sign, whatever images are
        widest = largest_input(data.normalization)
        target = replace(target, bounds=(-widest, widest), normalization=None)
    threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
    threat = threat.granting("defense") if adaptive else threat
    batches = in_batches(images, size)
    chosen = method(case, settings, adaptive=adaptive)
    first = epoch * len(batches)
    if only is not None:
        return invert(chosen, target, batches[only : only + 1], threat, settings, first=first + only)
    return invert(chosen, target, batches, threat, settings, first=first)


def leaked(
    case: Case,
    seen: Sequence[Answers],
    images: fp.Batch,
    data: Data,
    settings: Settings,
    *,
    adaptive: bool,
) -> Outcome:
    """The score of what the attacker makes of the answers of its epochs: taken as they are, or decoded."""
    answers, chosen = seen[0], method(case, settings, adaptive=adaptive)
    if adaptive and case.mixing is not None:
        # Soft labels, which are given, say which encoding is which: the order is known.
        found = [part.inputs for one in seen for part in one.parts if part.inputs is not None]
        mixings = [drawn(case.mixing, len(images), settings.seed, epoch) for epoch in range(len(seen))]
        decoding = Encodings(inner=chosen, masked=isinstance(case.mixing, InstaHide), ridge=RIDGE)
        answer = decoding.decode(
            torch.cat(found),
            torch.cat([one.partners for one in mixings]),
            torch.cat([one.coefficients for one in mixings]),
            generator(settings.seed, "decoding"),
            samples=len(images),
        )
        answers = Answers(parts=(answer,), seconds=tuple(second for one in seen for second in one.seconds))
    outcome = scored(answers, images, data.normalization, settings, method=chosen)
    inner = [part.status for one in seen for part in one.parts]
    return replace(outcome, statuses=tuple(dict.fromkeys([*inner, *outcome.statuses])))


def encode(mixing: MixUp, images: fp.Batch, model: nn.Module, seed: int, epoch: int) -> tuple[fp.Batch, Mixing]:
    """The encodings of all images in an epoch, and what was mixed."""
    context = Context(model=model, batch=images, indices=torch.arange(len(images)))
    encoded = mixing.on_batch(images, context, generator(seed, "encoding", epoch))
    return encoded, drawn(mixing, len(images), seed, epoch)


def drawn(mixing: MixUp, images: int, seed: int, epoch: int) -> Mixing:
    """What is mixed in an epoch: the first thing that is drawn."""
    return mixing.mixing(images, generator(seed, "encoding", epoch))


def largest_input(normalization: Normalization) -> float:
    """The largest magnitude that a pixel in [0, 1] can have as the network is fed it: known without any image."""
    return max(max(mean, 1 - mean) / std for mean, std in zip(*normalization, strict=True))
