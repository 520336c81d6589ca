"""The trials of table 2: networks to attack, trainings to the end, and what attackers make of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

import fedprism as fp
from fedprism import utility
from fedprism.defenses import InstaHide, MixUp
from fedprism.experiments import Outcome
from fedprism_papers.gradattack.attackers import ENCODED, Case, epochs, observe, told_all
from fedprism_papers.gradattack.inversion import Answers, Data, attacked_network, data_of
from fedprism_papers.shared import training
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.trials import Finished, RecipeTrial, earlier_tensors

NAIVE, ADAPTIVE = "naive", "adaptive"
BATCHES = {1: 4}
"""How many batches of a size are attacked, one unless said; the paper attacks 50 images in batches of each size."""
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)  # one training each
TRAINING = 50.0
"""The effort of a training to the end: run before attacks, which need the attacked networks to be there."""


@dataclass(frozen=True, kw_only=True)
class AttackedNetwork(RecipeTrial):
    """The network early in training, which is attacked."""

    mixing: MixUp | None

    @property
    def title(self) -> str:
        return f"training the attacked network ({'plain images' if self.mixing is None else repr(self.mixing)})"

    @property
    def effort(self) -> float:
        return math.inf  # attacks wait for it

    def run(self, device: str | None) -> Outcome:
        return self.done({}, _trained(self.mixing, self.settings).state_dict())


@dataclass(frozen=True, kw_only=True)
class Accuracy(RecipeTrial):
    """How well a network trained to the end under the defense does, with one seed."""

    case: Case
    seed: int

    @property
    def title(self) -> str:
        return f"{self.case.label}: training under the defense, seed {self.seed}"

    @property
    def effort(self) -> float:
        return TRAINING

    def run(self, device: str | None) -> Outcome:
        data = _data(self.settings)
        schedule = schedule_of(self.case, data)
        measured = utility.measure(
            data.network,
            data.train,
            data.test,
            self.case.defense,
            epochs=schedule.epochs,
            batch_size=schedule.batch_size,
            lr=schedule.lr,
            seeds=[self.seed],
            device=device,
            augment=schedule.augment,
            timed_steps=0,
        )
        return self.done({"accuracy": measured.accuracy}, {})


@dataclass(frozen=True, kw_only=True)
class InvertedBatch(RecipeTrial):
    """What an attacker makes of one batch of an epoch; without a batch, of all there is at once."""

    case: Case
    size: int
    attacker: str
    epoch: int
    batch: int | None

    @property
    def title(self) -> str:
        one = "" if self.batch is None else f", epoch {self.epoch + 1}, batch {self.batch + 1}"
        return f"{self.case.label}, batches of {self.size}: {self.attacker}{one}"

    @property
    def effort(self) -> float:
        return 1.0 if self.batch is not None else float(ENCODED)

    def run(self, device: str | None) -> Outcome:
        settings, adaptive = self.settings, self.attacker == ADAPTIVE
        data = _data(settings)
        images = data.first(attacked_images(self.case, self.size, settings))
        model = _network(self.case.mixing, settings)
        answers = observe(
            self.case, model, data, images, self.size, settings, adaptive=adaptive, epoch=self.epoch, only=self.batch
        )
        (answer,), (seconds,) = answers.parts, answers.seconds
        assert answer.inputs is not None
        values = {"status": str(answer.status), "ambiguity": sorted(answer.ambiguity)}
        return self.done(values, {"inputs": answer.tensor}, seconds)


@lru_cache(maxsize=1)
def _data(settings: Settings) -> Data:
    return data_of(settings)


@lru_cache(maxsize=1)
def _trained(mixing: MixUp | None, settings: Settings) -> nn.Module:
    return attacked_network(_data(settings), settings, mixing)


@lru_cache(maxsize=1)
def _network(mixing: MixUp | None, settings: Settings) -> nn.Module:
    """The attacked network as an earlier trial has left it; trained here if there is none."""
    stored = earlier_tensors(AttackedNetwork(mixing=mixing, settings=settings))
    model = _data(settings).network(settings.seed)
    model.load_state_dict(stored or _trained(mixing, settings).state_dict())
    return model


def trials_of(case: Case, size: int, settings: Settings) -> list[RecipeTrial]:
    """What the row of a case and a size is made of."""
    inverted = [trial for name in attackers(case) for trial in inversions(case, size, name, settings)]
    return [*trainings(case, settings), AttackedNetwork(mixing=case.mixing, settings=settings), *inverted]


def trainings(case: Case, settings: Settings) -> list[Accuracy]:
    seeds = QUICK_SEEDS if settings.quick else SEEDS
    return [Accuracy(case=case, seed=settings.seed + seed, settings=settings) for seed in seeds]


def inversions(case: Case, size: int, attacker: str, settings: Settings) -> list[InvertedBatch]:
    adaptive = attacker == ADAPTIVE
    count = -(-attacked_images(case, size, settings) // size)
    batches: Sequence[int | None] = [None] if adaptive and told_all(case) else range(count)
    return [
        InvertedBatch(case=case, size=size, attacker=attacker, epoch=epoch, batch=batch, settings=settings)
        for epoch in range(epochs(case, settings, adaptive=adaptive))
        for batch in batches
    ]


def answers_of(
    case: Case, size: int, attacker: str, results: Mapping[RecipeTrial, Finished[RecipeTrial]], settings: Settings
) -> list[Answers]:
    """What the attacker has recovered, epoch by epoch."""
    answers: dict[int, Answers] = {}
    for trial in inversions(case, size, attacker, settings):
        _, made, tensors = results[trial]
        earlier = answers.get(trial.epoch, Answers(parts=(), seconds=()))
        answer = fp.Reconstruction(
            inputs=tensors["inputs"], status=made.values["status"], ambiguity=frozenset(made.values["ambiguity"])
        )
        answers[trial.epoch] = Answers(
            parts=(*earlier.parts, answer), seconds=(*earlier.seconds, made.attack_seconds or 0.0)
        )
    return list(answers.values())


def time_factor(case: Case, data: Data, settings: Settings) -> float:
    return utility.time_factor(
        data.network, data.train, case.defense, schedule_of(case, data), seed=settings.seed, device=settings.device
    )


def schedule_of(case: Case, data: Data) -> utility.Schedule:
    """The published rates: 0.05, and 0.1 with MixUp."""
    plain = case.mixing is None or isinstance(case.mixing, InstaHide)
    rate = 0.05 if plain else 0.1
    return utility.Schedule(epochs=data.epochs, batch_size=data.batch_size, lr=rate, augment=training.shifted)


def attacked_images(case: Case, size: int, settings: Settings) -> int:
    """How many images a cell is about: full batches and, where images are mixed, at least as many as are mixed."""
    count = size * settings.batches_or(BATCHES.get(size, 1))
    return count if case.mixing is None else max(count, case.mixing.k)


def attackers(case: Case) -> tuple[str, ...]:
    """Without a defense there is nothing to adapt to."""
    return (NAIVE,) if case.defense == fp.chain() else (NAIVE, ADAPTIVE)
