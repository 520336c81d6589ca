"""The attackers of table 2: who does not know the defense, and who does.

Both are given the labels and the batch-norm statistics of every batch. The naive one takes what it finds for the image.
The adaptive one goes on from there with pruning inside its own gradients, and keeps what explains the update better.
Told which images were mixed and how, it looks for those that explain all updates of several epochs at once (MixUp), or
for the encodings of these epochs and solves for the images, because signs are not told (InstaHide).

Differs from the paper in: the paper's attacker decodes what it finds of MixUp too, and does not adapt to pruning; its
decoding is by gradient descent from zero, ours by phase retrieval from several starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import Encodings, GradientMatching, MixedSamples, joined
from fedprism.defenses import Context, Defense, InstaHide, MixUp, Prune
from fedprism.defenses.mixup import Mixing
from fedprism.pixels import Normalization
from fedprism.randomness import generator
from fedprism.solvers import TotalVariation
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared.base import Measured, Settings

QUICK_ITERATIONS = 150  # of a quick attack
ENCODED, QUICK_ENCODED, PAPER_ENCODED = 4, 2, 20
"""For how many epochs the attacker collects encodings."""
AT_ONCE = 0.02
"""The weight of total variation for all epochs at once: chosen on test images, which are not attacked."""
RIDGE = 1e-3
"""Against the noise on recovered encodings, when they are decoded."""


@dataclass(frozen=True)
class Case:
    """A defense with the paper's test accuracy and its average and best LPIPS for batches of 1, 16 and 32."""

    paper_accuracy: float
    paper: tuple[tuple[float, float], ...]
    ratio: float | None = None
    mixing: MixUp | None = None

    @property
    def label(self) -> str:
        pruned = [] if self.ratio is None else [f"GradPrune {self.ratio:g}"]
        kind = "Intra-InstaHide" if isinstance(self.mixing, InstaHide) else "MixUp"
        return " + ".join([*pruned, *([] if self.mixing is None else [f"{kind} {self.mixing.k}"])]) or "none"

    @property
    def variation(self) -> float:
        """The published weight of total variation."""
        if self.mixing is None:
            return 0.05
        return 0.01 if isinstance(self.mixing, InstaHide) else 0.1

    @property
    def paper_time(self) -> float:
        """The paper's time of a training step, in that of one without defense."""
        return 1.0 + 0.04 * (self.ratio is not None) + 0.06 * (self.mixing is not None)

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
        inversion.exact_statistics(settings, QUICK_ITERATIONS),
        priors=(TotalVariation(case.variation, magnitude=signs),),
        adaptive=adaptive,
    )


def method_at_once(case: Case, settings: Settings) -> MixedSamples:
    """The attack on all updates of mixed images: more is said about an image, so that less needs to be believed."""
    matching = method(case, settings, adaptive=True)
    return MixedSamples(matching=replace(matching, priors=(TotalVariation(AT_ONCE),)))


def encoded(settings: Settings) -> int:
    """For how many epochs the adaptive attacker collects what the client sends of mixed images."""
    return settings.encodings or (QUICK_ENCODED if settings.quick else ENCODED)


def epochs(case: Case, settings: Settings, *, adaptive: bool) -> int:
    """For how many epochs this attacker has to be asked: of MixUp it answers for all of them at once."""
    return encoded(settings) if adaptive and isinstance(case.mixing, InstaHide) else 1


def observe(
    case: Case,
    model: nn.Module,
    data: inversion.Data,
    images: fp.Batch,
    size: int,
    settings: Settings,
    *,
    adaptive: bool,
    epoch: int = 0,
    only: int | None = None,
) -> inversion.Answers:
    """What comes back of one epoch: images or their encodings; to the adaptive attacker on MixUp of all epochs."""
    if adaptive and told_all(case):
        return _at_once(case, model, data, images, size, settings)
    if case.mixing is not None:
        images, _ = encode(case.mixing, images, model, settings.seed, epoch)
    target = inversion.Target(model=model, defense=case.on_gradients, normalization=data.normalization)
    if isinstance(case.mixing, InstaHide):  # encodings are of either sign, whatever images are
        widest = largest_input(data.normalization)
        target = replace(target, bounds=(-widest, widest), normalization=None)
    threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
    threat = threat.granting("defense") if adaptive else threat
    batches = inversion.in_batches(images, size)
    chosen = method(case, settings, adaptive=adaptive)
    first = epoch * len(batches)
    if only is not None:
        return inversion.invert(chosen, target, batches[only : only + 1], threat, settings, first=first + only)
    return inversion.invert(chosen, target, batches, threat, settings, first=first)


def told_all(case: Case) -> bool:
    """Whether the mixing is all there is between the images and what the network is fed."""
    return case.mixing is not None and not isinstance(case.mixing, InstaHide)


def _at_once(
    case: Case, model: nn.Module, data: inversion.Data, images: fp.Batch, size: int, settings: Settings
) -> inversion.Answers:
    """The images that explain the gradients of all epochs together."""
    assert case.mixing is not None
    target = inversion.Target(model=model, defense=case.on_gradients, normalization=data.normalization)
    threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact", "defense")
    both = [encode(case.mixing, images, model, settings.seed, epoch) for epoch in range(encoded(settings))]
    behind = [batch for encodings, _ in both for batch in inversion.in_batches(encodings, size)]
    parts = [
        fp.simulate(target.scenario(batch), threat, seed=settings.seed + number, device=settings.device)[0]
        for number, batch in enumerate(behind)
    ]
    whole, mixings = joined(parts), [mixing for _, mixing in both]
    known = replace(
        whole.knowledge,
        mixing={
            "mapping": torch.cat([one.partners for one in mixings]),
            "coefficients": torch.cat([one.coefficients for one in mixings]),
            "updates": torch.cat([torch.full((len(batch),), number) for number, batch in enumerate(behind)]),
        },
    )
    start = time.perf_counter()
    answer = fp.run(
        method_at_once(case, settings), replace(whole, knowledge=known), seed=settings.seed, device=settings.device
    )
    return inversion.Answers(parts=(answer,), seconds=(time.perf_counter() - start,))


def leaked(
    case: Case,
    by_epoch: Sequence[inversion.Answers],
    images: fp.Batch,
    data: inversion.Data,
    settings: Settings,
    *,
    adaptive: bool,
) -> Measured:
    """The score of what the attacker makes of the answers of its epochs: as they are, or decoded."""
    answers, chosen = by_epoch[0], method(case, settings, adaptive=adaptive)
    if adaptive and told_all(case):
        return inversion.scored(answers, images, data.normalization, settings, method=method_at_once(case, settings))
    if adaptive and case.mixing is not None:
        # Soft labels, which are given, say which encoding is which: the order is known.
        encodings = [part.tensor for one in by_epoch for part in one.parts if part.inputs is not None]
        mixings = [drawn(case.mixing, len(images), settings.seed, epoch) for epoch in range(len(by_epoch))]
        decoding = Encodings(inner=chosen, masked=True, ridge=RIDGE)
        answer = decoding.decode(
            torch.cat(encodings),
            torch.cat([one.partners for one in mixings]),
            torch.cat([one.coefficients for one in mixings]),
            generator(settings.seed, "decoding"),
            samples=len(images),
        )
        answers = inversion.Answers(
            parts=(answer,), seconds=tuple(second for one in by_epoch for second in one.seconds)
        )
    outcome = inversion.scored(answers, images, data.normalization, settings, method=chosen)
    inner = [part.status for one in by_epoch for part in one.parts]
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
