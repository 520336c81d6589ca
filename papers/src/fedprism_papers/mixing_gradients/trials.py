"""The attacks of the mixing-gradients study on one cell: many batches side by side, and how much of them came back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import LBFGS, GradientMatching, joined, mixing_angle, mixing_l2, mixing_orthogonal
from fedprism.experiments import Outcome
from fedprism.metrics import THRESHOLD_LOOSE, THRESHOLD_STRICT, avd, avd_floor, recovery_rate
from fedprism.metrics.recovery import THRESHOLD_PIXELS, RecoveryRate
from fedprism.randomness import generator
from fedprism_papers.mixing_gradients.direct import EQUAL, LOSSES, RANDOM, Layer, uniform_
from fedprism_papers.mixing_gradients.side_by_side import SideBySide
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.trials import RecipeTrial

MNIST, FACES, DIGITS = "mnist", "lfw", "digits"
SIDE, QUICK_SIDE = 32, 16
"""Of faces, and of the digits of a quick run."""
ATTACKS = {"l2": mixing_l2, "angle": mixing_angle, "orthogonal": mixing_orthogonal}
KINDS = (RANDOM, EQUAL)
STRICT, LOOSE = f"AVD < {THRESHOLD_STRICT}", f"AVD < {THRESHOLD_LOOSE}"
UNCUT_STRICT, UNCUT_LOOSE = f"uncut {STRICT}", f"uncut {LOOSE}"
BEATS_BLANK, CLOSE_PIXELS = "better than blank", f"MSE < {THRESHOLD_PIXELS}"
MEASURES = {
    UNCUT_STRICT: ("uncut", THRESHOLD_STRICT),
    UNCUT_LOOSE: ("uncut", THRESHOLD_LOOSE),
    STRICT: ("avd", THRESHOLD_STRICT),
    LOOSE: ("avd", THRESHOLD_LOOSE),
    BEATS_BLANK: ("beats blank", THRESHOLD_STRICT),
    CLOSE_PIXELS: ("mse", THRESHOLD_PIXELS),
}
"""What is compared with what: a score of `score_trials`, and the threshold below which the trial succeeded."""
CRITERIA = tuple(MEASURES)
ATTACKER = fp.threats.honest_but_curious.withholding("bounds")
"""Not told the range of pixels, so that what the optimiser ends with is seen before it is cut to that range."""
UNIFORM, ORDINARY = "uniform", "PyTorch's"
"""Weights that an attacked network has: uniform on [-0.5, 0.5] as in the paper, or as PyTorch initialises them."""
SHOWN_TRIALS = 8  # whose pictures are kept


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long an attack goes on: iterations of `inner` quasi-Newton steps each."""

    iterations: int
    lr: float
    inner: int = 1

    def of(self, attack: GradientMatching) -> GradientMatching:
        return replace(attack, iterations=self.iterations, lr=self.lr, optimizer=LBFGS(inner=self.inner))

    def __str__(self) -> str:
        steps = str(self.iterations) if self.inner == 1 else f"{self.iterations} x {self.inner}"
        return f"{steps} x {self.lr}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is attacked. `width`: the channels of a LeNet; None is the single dense layer."""

    data: str
    width: int | None
    loss: str
    size: int
    effort: Effort
    weights: str = UNIFORM

    @property
    def network(self) -> str:
        return "dense" if self.width is None else "lenet"

    def model(self, images: fp.data.ImageSet, rng: torch.Generator) -> nn.Module:
        return network(images, self.width, rng, self.weights)


@lru_cache(maxsize=2)
def images(name: str, settings: Settings, split: str = "test") -> fp.data.ImageSet:
    if name == DIGITS:
        return fp.data.load("digits", size=QUICK_SIDE)
    if name == FACES:
        return fp.data.load("lfw", size=SIDE, data_dir=settings.data_dir)
    return fp.data.load("mnist", split=split, data_dir=settings.data_dir)


def loss_name(loss: str) -> str:
    """As tables have it."""
    return next(name for name, known in LOSSES.items() if known == loss)


def network(images: fp.data.ImageSet, width: int | None, rng: torch.Generator, weights: str = UNIFORM) -> nn.Module:
    """A LeNet of so many channels, or the dense layer."""
    shape = tuple(images.images.shape[1:])
    seed = int(torch.randint(2**31, (), generator=rng)) if weights == ORDINARY else 0
    name, options = ("dense", {}) if width is None else ("lenet", {"width": width})
    model = fp.models.build(name, input_shape=shape, classes=images.classes, seed=seed, **options)
    return model if weights == ORDINARY else uniform_(model, rng)


@dataclass(frozen=True, kw_only=True)
class AttackedCase(RecipeTrial):
    """All attacks on all batches of a case."""

    case: Case
    trials: int

    @property
    def title(self) -> str:
        case = self.case
        return f"{case.data}, {case.network} {case.width or ''}, {case.loss}, batch of {case.size}"

    def run(self, device: str | None) -> Outcome:
        return self.done(*attacked(self.case, images(self.case.data, self.settings), self.trials, self.settings))


class Recovered(NamedTuple):
    """Of each kind of labels and each attack the scores of every trial's best image, and pictures as bytes."""

    scores: dict[str, dict[str, Any]]
    pictures: dict[str, Tensor]


def attacked(case: Case, images: fp.data.ImageSet, trials: int, settings: Settings) -> Recovered:
    """Trials of all kinds of labels, attacked side by side. A kind that the data has no batch for is left out."""
    drawn = {kind: _observed(case, kind, images, trials, settings) for kind in KINDS}
    drawn = {kind: pairs for kind, pairs in drawn.items() if pairs}
    observations = [observation for pairs in drawn.values() for observation, _ in pairs]
    truths = [truth for pairs in drawn.values() for _, truth in pairs]
    cell: dict[str, Any] = {kind: {} for kind in drawn}
    pictures: dict[str, Tensor] = {}
    for name, preset in ATTACKS.items() if observations else ():
        attack, start = case.effort.of(preset()), time.perf_counter()
        answer = fp.run(SideBySide(attack=attack), joined(observations), seed=settings.seed, device=settings.device)
        seconds = time.perf_counter() - start
        assert answer.inputs is not None
        shape = (len(truths), case.size, *answer.tensor.shape[1:])
        sources = torch.stack([truth.tensor for truth in truths])
        scored = score_trials(answer.tensor.view(shape), sources, answer.diagnostics["starts"].view(shape))
        for number, kind in enumerate(drawn):
            rows = slice(number * trials, (number + 1) * trials)
            cell[kind][name] = {
                **{metric: values[rows].tolist() for metric, values in scored.items() if values.dim() == 1},
                "statuses": answer.diagnostics["statuses"][rows],
                "seconds": seconds / len(truths),
                "settings": repr(attack),
            }
            shown = scored["pictures"][rows][:SHOWN_TRIALS].cpu().clamp(0, 1)
            pictures[f"{kind}, {name}"] = (shown * 255).round().to(torch.uint8)
    return Recovered(cell, pictures)


def _observed(
    case: Case, kind: str, images: fp.data.ImageSet, trials: int, settings: Settings
) -> list[tuple[fp.Observation, fp.Truth]]:
    """Every trial has a batch and a network of its own, the same ones for all losses."""
    layer, pairs = Layer(data=images, classes=images.classes), []
    for number in range(trials):
        rng = generator(settings.seed, "mixing", case.data, case.width, case.size, kind, number)
        batch = layer.draw(case.size, kind, rng)
        if batch is None:
            return []
        scenario = fp.Scenario(model=case.model(images, rng), clients=[batch], loss=case.loss)
        pairs.append(fp.simulate(scenario, ATTACKER, seed=settings.seed + number, device=settings.device))
    return pairs


def score_trials(recovered: Tensor, sources: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """The best pair of any recovered and any private image, by every measure: (trials, batch, *image) -> (trials,)."""
    trials, size, *shape = recovered.shape
    uncut = recovered.unsqueeze(2).expand(-1, -1, size, *shape)
    theirs = sources.unsqueeze(1).expand_as(uncut)
    noise = starts.unsqueeze(2).expand_as(uncut)
    pairs = [images.reshape(-1, *shape) for images in (uncut.clamp(0, 1), theirs, noise)]
    distance = avd(*pairs).view(trials, -1)
    before = avd(uncut.reshape(-1, *shape), *pairs[1:]).view(trials, -1)
    blank = avd_floor(pairs[1], pairs[2]).view(trials, -1)
    error = (pairs[0] - pairs[1]).square().flatten(1).mean(1).view(trials, -1)
    least, where = distance.min(1)
    rows = torch.arange(trials)
    best = [images.view(trials, -1, *shape)[rows, where] for images in (pairs[1], pairs[0])]
    return {
        "avd": least,  # of pixels cut to [0, 1]
        "uncut": before.min(1).values,
        "blank": blank[rows, where],
        # the smallest distance that beats that of a blank image, infinite if none does
        "beats blank": torch.where(distance < blank, distance, float("inf")).min(1).values,
        "mse": error.min(1).values,
        "mse of avd": error[rows, where],
        "pictures": torch.stack(best, dim=1),
    }


def recovered(scored: Mapping[str, Sequence[float]], criterion: str) -> RecoveryRate:
    """The fraction of trials that count as recovered."""
    metric, threshold = MEASURES[criterion]
    return recovery_rate(torch.tensor(scored[metric], dtype=torch.float64), threshold)
