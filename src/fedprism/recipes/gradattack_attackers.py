"""The attackers of table 2: who does not know the defense, and who does.

Both are given the labels and the batch-norm statistics of every batch. The naive one takes what it finds for the image.
The adaptive one goes on from there with pruning inside its own gradients, and keeps what explains the update better; of
mixed images it looks for the encodings of several epochs and solves for the images, told which were mixed and how.

Differs from the paper in: the paper's attacker decodes, and does not adapt to pruning; its decoding is by gradient
descent from zero, ours in closed form (MixUp) or by phase retrieval from several starts (InstaHide).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, GradientMatching, Labels, bn_exact
from fedprism.attacks.base import only_round
from fedprism.attacks.forward import forward_model
from fedprism.batchnorm import pull_prior
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
from fedprism.solvers import TotalVariation, decode_mixtures
from fedprism.types import Ambiguity, Observation

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


@dataclass(frozen=True, kw_only=True, repr=False)
class IgnoreThenFollow(Attack):
    """Attacks as if there were no defense, goes on from there with the defense inside its own gradients.

    From noise the objective with pruning in it hardly descends: most entries count nothing until they are too large.
    Near an answer it does. Both answers are measured by that objective, priors included, and the better is returned.
    """

    inner: GradientMatching
    rate: float = 0.03
    """The learning rate from the first answer on: small, or it is lost at once."""

    citation: ClassVar[str] = GradientMatching.citation

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    @property
    def uses(self) -> frozenset[str]:
        return self.inner.uses

    def run(self, observation: Observation, rng: torch.Generator) -> fp.Reconstruction:
        objective = self._objective(observation)
        ignoring = replace(self.inner, adaptive=False).run(observation, rng)
        goes_on = replace(
            self.inner, adaptive=True, start=lambda shape, rng: _inputs(ignoring), restarts=1, race=0.0, lr=self.rate
        )
        answers = {"ignoring the defense": ignoring, "following the defense": goes_on.run(observation, rng)}
        objectives = {way: objective(answer) for way, answer in answers.items()}
        best = min(objectives, key=lambda way: objectives[way])
        return replace(
            answers[best],
            status=f"{answers[best].status}; {best} explains more",
            diagnostics={**answers[best].diagnostics, **objectives},
        )

    def _objective(self, observation: Observation) -> Callable[[fp.Reconstruction], float]:
        inner, knowledge = self.inner, observation.knowledge
        forward = forward_model(observation, only_round(self, observation.rounds), normalise=inner.normalise)
        pull = pull_prior(forward.model, forward.params, forward.buffers, knowledge, inner.pull, inner.pull_weight)

        def objective(answer: fp.Reconstruction) -> float:
            inputs = _inputs(answer)
            assert answer.labels is not None
            explained = forward(inputs, answer.labels, create_graph=False)
            with torch.no_grad():
                believed = sum(float(prior(inputs)) for prior in (*inner.priors, pull) if prior is not None)
                return float(inner.distance(explained, forward.target)) + believed

        return objective


def _inputs(answer: fp.Reconstruction) -> Tensor:
    assert answer.inputs is not None
    return answer.inputs


def method(case: Case, settings: Settings, *, adaptive: bool) -> Attack:
    signs = adaptive and isinstance(case.mixing, InstaHide)
    chosen = replace(
        bn_exact(),
        labels=Labels.KNOWN,
        priors=(TotalVariation(case.variation, magnitude=signs),),
        iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS),
        adaptive=adaptive,
        engine=ENGINE,
    )
    return IgnoreThenFollow(inner=chosen) if adaptive and case.ratio is not None else chosen


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
    answers = seen[0]
    if adaptive and case.mixing is not None:
        # Soft labels, which are given, say which encoding is which: the order is known.
        found = [part.inputs for one in seen for part in one.parts if part.inputs is not None]
        mixings = [drawn(case.mixing, len(images), settings.seed, epoch) for epoch in range(len(seen))]
        answer = decoded(case.mixing, torch.cat(found), mixings, len(images), settings.seed)
        answers = Answers(parts=(answer,), seconds=tuple(second for one in seen for second in one.seconds))
    chosen = method(case, settings, adaptive=adaptive)
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


def decoded(mixing: MixUp, encodings: Tensor, mixings: Sequence[Mixing], images: int, seed: int) -> fp.Reconstruction:
    """The images behind encodings of several epochs, (epochs * images, *input_shape)."""
    found = decode_mixtures(
        encodings,
        torch.cat([one.partners for one in mixings]),
        torch.cat([one.coefficients for one in mixings]),
        masked=isinstance(mixing, InstaHide),
        samples=images,
        ridge=RIDGE,
        rng=generator(seed, "decoding"),
    )
    either_way: frozenset[Ambiguity] = frozenset({"sign"}) if found.ambiguity else frozenset()
    return fp.Reconstruction(inputs=found.inputs, ambiguity=either_way, status=str(found.status))


def largest_input(normalization: Normalization) -> float:
    """The largest magnitude that a pixel in [0, 1] can have as the network is fed it: known without any image."""
    return max(max(mean, 1 - mean) / std for mean, std in zip(*normalization, strict=True))
