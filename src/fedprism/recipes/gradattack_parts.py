"""The parts that table 2 is made of: networks to attack, trainings to the end, and what attackers make of a batch.

Each is computed by itself, so that a machine may work on many of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

import fedprism as fp
from fedprism import utility
from fedprism.defenses import InstaHide, MixUp
from fedprism.recipes import training
from fedprism.recipes.base import Settings
from fedprism.recipes.gradattack import Answers, Data, attacked_network, data_of
from fedprism.recipes.gradattack_attackers import ENCODED, Case, epochs, observe, told_all
from fedprism.recipes.parts import Part, computed_part
from fedprism.recipes.shelf import Made

NAIVE, ADAPTIVE = "naive", "adaptive"
BATCHES = {1: 4}
"""How many batches of a size are attacked, one unless said; the paper attacks 50 images in batches of each size."""
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
TRAINING = 50.0
"""The effort of a training to the end, in attacks on a single image: less than that, but attacks that begin before the
networks they need are there would each train their own."""


@dataclass(frozen=True, kw_only=True)
class Trained(Part):
    """The network early in training, which is attacked."""

    mixing: MixUp | None

    @property
    def title(self) -> str:
        return f"training the attacked network ({'plain images' if self.mixing is None else repr(self.mixing)})"

    @property
    def effort(self) -> float:
        return math.inf  # attacks wait for it

    def make(self, settings: Settings) -> Made:
        return Made({}, dict(_trained(self.mixing, settings).state_dict()))


@dataclass(frozen=True, kw_only=True)
class Accuracy(Part):
    """How well a network trained to the end under the defense does, with one seed."""

    case: Case
    seed: int

    @property
    def title(self) -> str:
        return f"{self.case.label}: training under the defense, seed {self.seed}"

    @property
    def effort(self) -> float:
        return TRAINING

    def make(self, settings: Settings) -> Made:
        found = price(self.case, _data(settings), settings, [self.seed])
        return Made({"accuracy": found.accuracy, "steps": found.steps, "status": found.status}, {})


@dataclass(frozen=True, kw_only=True)
class Seen(Part):
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
        """In attacks on a single image: a small batch costs nearly as much, the longest looks at all epochs at once."""
        batch = 1 + self.size / 40
        if self.attacker == NAIVE:
            return batch
        rounds = 1 if self.case.ratio is None else 2
        if self.case.mixing is None or not told_all(self.case):
            return rounds * batch
        return rounds * batch * ENCODED * max(1, self.case.mixing.k / self.size)

    def make(self, settings: Settings) -> Made:
        data, adaptive = _data(settings), self.attacker == ADAPTIVE
        images = data.first(attacked_images(self.case, self.size, settings))
        model = _network(self.case.mixing, settings)
        answers = observe(
            self.case,
            model,
            data,
            images,
            self.size,
            settings,
            adaptive=adaptive,
            epoch=self.epoch,
            only=self.batch,
        )
        (found,), (seconds,) = answers.parts, answers.seconds
        assert found.inputs is not None
        said = {"seconds": seconds, "status": found.status, "ambiguity": sorted(found.ambiguity)}
        return Made(said, {"inputs": found.inputs})


@lru_cache(maxsize=1)
def _data(settings: Settings) -> Data:
    return data_of(settings)


@lru_cache(maxsize=1)
def _trained(mixing: MixUp | None, settings: Settings) -> nn.Module:
    return attacked_network(_data(settings), settings, mixing)


@lru_cache(maxsize=1)
def _network(mixing: MixUp | None, settings: Settings) -> nn.Module:
    model = _data(settings).network(settings.seed)
    model.load_state_dict(computed_part(Trained(mixing=mixing), settings).tensors)
    return model


def parts(cases: Sequence[Case], sizes: Sequence[int], settings: Settings, *, priced: bool = True) -> list[Part]:
    """Everything that has to be computed, once; trainings to the end only where prices are asked for."""
    found = (part for case in cases for size in sizes for part in parts_of(case, size, settings, priced=priced))
    return list(dict.fromkeys(found))


def parts_of(case: Case, size: int, settings: Settings, *, priced: bool = True) -> list[Part]:
    """What the row of a case and a size is made of."""
    return [
        *(trainings(case, settings) if priced else ()),
        Trained(mixing=case.mixing),
        *(part for name in attackers(case) for part in observations(case, size, name, settings)),
    ]


def trainings(case: Case, settings: Settings) -> list[Accuracy]:
    return [Accuracy(case=case, seed=settings.seed + seed) for seed in (QUICK_SEEDS if settings.quick else SEEDS)]


def observations(case: Case, size: int, attacker: str, settings: Settings) -> list[Seen]:
    adaptive = attacker == ADAPTIVE
    batches = -(-attacked_images(case, size, settings) // size)
    each: Sequence[int | None] = [None] if adaptive and told_all(case) else range(batches)
    return [
        Seen(case=case, size=size, attacker=attacker, epoch=epoch, batch=batch)
        for epoch in range(epochs(case, settings, adaptive=adaptive))
        for batch in each
    ]


def seen(case: Case, size: int, made: Mapping[Part, Made], settings: Settings) -> dict[str, list[Answers]]:
    """What each attacker has seen, epoch by epoch."""
    found: dict[str, list[Answers]] = {}
    for name in attackers(case):
        wanted = observations(case, size, name, settings)
        for epoch in sorted({part.epoch for part in wanted}):
            own = [made[part] for part in wanted if part.epoch == epoch]
            answers = tuple(
                fp.Reconstruction(
                    inputs=one.tensors["inputs"],
                    status=one.said["status"],
                    ambiguity=frozenset(one.said["ambiguity"]),
                )
                for one in own
            )
            seconds = tuple(float(one.said["seconds"]) for one in own)
            found.setdefault(name, []).append(Answers(parts=answers, seconds=seconds))
    return found


def cost(case: Case, made: Mapping[Part, Made], factor: float, settings: Settings) -> utility.Utility:
    """Accuracy and time under the defense, over all seeds."""
    own = {part.seed: made[part].said for part in trainings(case, settings)}
    return utility.Utility(
        defense=case.defense,
        seeds=tuple(own),
        accuracies=tuple(float(said["accuracy"]) for said in own.values()),
        steps=max(said["steps"] for said in own.values()),
        time_factor=factor,
        status="; ".join(dict.fromkeys(said["status"] for said in own.values() if said["status"])),
    )


def price(case: Case, data: Data, settings: Settings, seeds: Sequence[int]) -> utility.Utility:
    """Accuracy under the defense."""
    schedule = schedule_of(case, data)
    return utility.measure(
        data.network,
        data.train,
        data.test,
        case.defense,
        epochs=schedule.epochs,
        batch_size=schedule.batch_size,
        lr=schedule.lr,
        seeds=seeds,
        device=settings.device,
        augment=schedule.augment,
        timed_steps=0,
    )


def time_factor(case: Case, data: Data, settings: Settings) -> float:
    return utility.time_factor(
        data.network,
        data.train,
        case.defense,
        schedule_of(case, data),
        seed=settings.seed,
        device=settings.device,
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
