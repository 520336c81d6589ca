"""Accuracy, time and privacy of training under a defense, over several seeds."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from fedprism.checks import shown, whole
from fedprism.defenses import Chain, Defense, chain
from fedprism.errors import BadInput, NotApplicable, told
from fedprism.files import json_text
from fedprism.inputs import arguments, shape_of, types_of
from fedprism.losses import IGNORED_LABEL, class_dimension, name_of, predictions
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices, memory
from fedprism.types import Batch, LossFn, Record, is_soft
from fedprism.utility.privacy import guarantee
from fedprism.utility.training import Augmentation, Factory, Run, Schedule, fit

CONFIDENCE = 0.95
"""Of the interval for the mean accuracy."""
FEWEST_SEEDS = 5
"""Seeds from which an interval is stated: Student's factor is 12.7 for two seeds, 4.3 for three and 2.8 for five."""
WARM_UP = 3
"""Steps of each training that are not timed: the first ones allocate memory and choose algorithms."""
TESTED_TOGETHER = 512
"""Test samples per forward pass at most: a bound on memory."""


class Interval(NamedTuple):
    low: float
    high: float


NOTHING_LEARNED = (
    "not clearly better than always answering with the most frequent class; train longer or at another rate"
)
CLEARLY = 2.0
"""Standard deviations of the accuracy by which a model must beat that answer: of so many test samples, luck makes less
difference in about 98 of 100 cases."""


@dataclass(frozen=True, kw_only=True)
class Utility:
    """The result of training under a defense.

    accuracies: one per seed. time_factor: of a step, over one without defense. epsilon, release_epsilon: what DP-SGD
    guarantees every example at `delta`, over the whole training and for one release, if anything (`guarantee`).
    """

    defense: Defense
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    steps: int
    time_factor: float | None = None
    epsilon: float | None = None
    release_epsilon: float | None = None
    delta: float | None = None
    status: str = ""

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> Interval | None:
        """Where the mean of ever more seeds would lie, at 95% (Student's t); None for fewer than five seeds."""
        return seed_interval(self.accuracies, Interval(0.0, 1.0))

    def record(self, run: Mapping[str, object] | None = None) -> Record:
        """The line of a result; `run` says what else was trained: network, data, settings."""
        return Record(
            kind="utility",
            run={"defense": repr(self.defense), "steps": self.steps, **(run or {})},
            scores={
                "accuracy": self.accuracies,
                "seeds": self.seeds,
                "interval": None if self.interval is None else tuple(self.interval),
                "delta": self.delta,
                "release_epsilon": self.release_epsilon,
            },
            accuracy=self.accuracy,
            time_factor=self.time_factor,
            epsilon=self.epsilon,
            status=self.status,
            seed=self.seeds[0],
            versions=json_text.versions(),
        )

    def __str__(self) -> str:
        between = "" if self.interval is None else f" ({self.interval.low:.1%} to {self.interval.high:.1%})"
        words = [f"{self.defense!r}: accuracy {self.accuracy:.1%}{between}"]
        if self.time_factor is not None:
            words.append(f"{self.time_factor:.2f} times the time per step")
        if self.epsilon is not None:
            one = "" if self.release_epsilon is None else f", {self.release_epsilon:.3g} for one release,"
            words.append(f"epsilon {self.epsilon:.3g} for the whole training{one} at delta {self.delta:g}")
        return ", ".join([*words, *([self.status] if self.status else [])])


def measure(
    model: nn.Module | Factory,
    train: Batch,
    test: Batch,
    defense: Defense | None = None,
    *,
    epochs: int = 30,
    batch_size: int = 128,
    clients: int = 1,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    seeds: Sequence[int] = (0, 1, 2),
    device: str | torch.device | None = None,
    loss: str | LossFn = "cross_entropy",
    augment: Augmentation | None = None,
    delta: float = 1e-5,
    timed_steps: int = 21,
) -> Utility:
    """Train under the defense, once for each seed, and report accuracy, time and privacy.

    `model` is a network, of which every seed trains a copy, or a function from a seed to a network. `augment` changes
    `train` anew every epoch. Each of `clients` clients sends the gradient of `batch_size` samples per step.
    `timed_steps` steps with and without the defense are timed; 0 leaves time_factor out.
    """
    defense = chain(defense) if defense is not None else Chain()
    schedule = Schedule(
        epochs=epochs,
        batch_size=batch_size,
        clients=clients,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        loss=loss,
        augment=augment,
    )
    if not seeds:
        raise BadInput("give at least one seed. Three show how much accuracies vary.")
    if not 0 < delta < 1:
        raise BadInput(f"delta must be between 0 and 1, not {delta}. 1e-5 is common, one over the data size the most.")
    whole(timed_steps, "timed_steps", 10**6, 0)
    place, accuracies, strayed = devices.pick(device), list[float](), list[int]()
    _check(_network(model, seeds[0]), train, test, loss)
    if len(train) < clients:
        raise BadInput(f"{clients} clients need a sample each, but there are {len(train)}. Give more data.")
    for number, seed in enumerate(seeds):
        done, total = number * epochs, len(seeds) * epochs
        network = fit(_network(model, seed), train, defense, schedule, seed=seed, device=place, done=done, total=total)
        right, finite = _tested(network, test, loss, place)
        accuracies.append(right)
        if not finite:
            strayed.append(seed)
    private, factor = guarantee(defense, epochs, delta), None
    if timed_steps or defense == Chain():
        factor = time_factor(model, train, defense, schedule, seed=seeds[0], device=place, steps=timed_steps)
    return Utility(
        defense=defense,
        seeds=tuple(seeds),
        accuracies=tuple(accuracies),
        steps=epochs * schedule.steps_an_epoch(len(train)),
        time_factor=factor,
        epsilon=None if private is None else private.run,
        release_epsilon=None if private is None else private.release,
        delta=None if private is None else delta,
        status=_status(accuracies, strayed, test),
    )


def _status(accuracies: Sequence[float], strayed: Sequence[int], test: Batch) -> str:
    if strayed:
        return f"training diverged with seed {', '.join(map(str, strayed))}; lower lr"
    counted = test.labels[test.labels != IGNORED_LABEL] if not is_soft(test.labels) else test.labels.argmax(1)
    guessing = float(counted.long().flatten().bincount().max()) / counted.numel()
    luck = math.sqrt(guessing * (1 - guessing) / counted.numel())
    return NOTHING_LEARNED if statistics.fmean(accuracies) <= guessing + CLEARLY * luck else ""


def _network(model: nn.Module | Factory, seed: int) -> nn.Module:
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model(seed)


def _tested(model: nn.Module, data: Batch, loss: str | LossFn, place: torch.device) -> tuple[float, bool]:
    """The fraction of answers that the model gets right, and whether all its outputs are finite."""
    model.eval()
    right, finite = list[Tensor](), True
    with torch.no_grad():
        together = memory.together(min(len(data), TESTED_TOGETHER))
        for start in range(0, len(data), together):
            part = data[start : start + together]
            placed = part.to(place)
            args, kwargs = arguments(placed.inputs)
            outputs = predictions(model(*args, **kwargs))
            right.append(_right(outputs, placed.labels, loss).cpu())
            finite = finite and bool(torch.isfinite(outputs).all())
    return float(torch.cat(right).double().mean()), finite


def _right(outputs: Tensor, labels: Tensor, loss: str | LossFn) -> Tensor:
    """Whether each answer is right: one per sample, or one per token, pixel, or label of several."""
    if name_of(loss) == "binary_cross_entropy":
        return ((outputs > 0) == (labels.reshape(outputs.shape) > 0.5)).flatten()
    if is_soft(labels):
        return outputs.argmax(1) == labels.argmax(1)
    answers = outputs.argmax(class_dimension(outputs, labels))
    return (answers == labels)[labels != IGNORED_LABEL]


def time_factor(
    model: nn.Module | Factory,
    data: Batch,
    defense: Defense,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    steps: int = 21,
) -> float:
    """The median time of a defended training step over that of a step without defense; the two trainings take turns."""
    if defense == Chain():
        return 1.0
    whole(steps, "steps", 10**6)
    schedule, place = schedule or Schedule(), devices.pick(device)
    runs = [Run(_network(model, seed), data, d, schedule, seed, place) for d in (defense, Chain())]
    with seeded_layers(generator(seed, "layers")):
        endless = [_endless(run) for run in runs]
        for _ in range(WARM_UP):
            for training in endless:
                next(training)
        # Whoever comes second may find the machine better prepared: that alternates.
        pairs = [{k: _seconds(endless[k], place) for k in ((0, 1), (1, 0))[pair % 2]} for pair in range(steps)]
    return statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)


def _endless(run: Run) -> Iterator[None]:
    while True:
        yield from run.epoch()


def _seconds(steps: Iterator[None], place: torch.device) -> float:
    """How long the next step takes."""
    _wait(place)
    start = time.perf_counter()
    next(steps)
    _wait(place)
    return time.perf_counter() - start


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval for the mean of what the values were drawn from; None for fewer than two values."""
    if len(values) < 2:
        return None
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, len(values) - 1))
    mean, margin = statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - margin, mean + margin)


def seed_interval(values: Sequence[float], possible: Interval) -> Interval | None:
    """Student's interval inside the range that is possible; None for too few seeds, whose values say more."""
    interval = t_interval(values) if len(values) >= FEWEST_SEEDS and all(map(math.isfinite, values)) else None
    return interval and Interval(max(possible.low, interval.low), min(possible.high, interval.high))


def _check(model: nn.Module, train: Batch, test: Batch, loss: str | LossFn) -> None:
    """Both sets are fit to be fed to the model, one sample of each is, and every label is one of its classes."""
    for name, data in (("train", train), ("test", test)):
        if not isinstance(data.labels, Tensor):
            raise BadInput(f"{name} has no labels, but {shown(data.labels)}. Give Batch(inputs, labels).")
        if len(data) == 0 or len(data) != len(data.labels):
            raise BadInput(
                f"{name} has {len(data)} inputs and {len(data.labels)} labels; it needs as many of each, and "
                "at least one."
            )
        outputs = _outputs(model, data, name)
        if name_of(loss) == "binary_cross_entropy":
            _check_yes_or_no(outputs, data.labels, name)
        else:
            _check_classes(outputs, data.labels, name)


def _check_yes_or_no(outputs: Tensor, labels: Tensor, name: str) -> None:
    if labels[: len(outputs)].numel() != outputs.numel() or not bool(((labels == 0) | (labels == 1)).all()):
        raise NotApplicable(
            f"accuracy under binary_cross_entropy needs a label 0 or 1 per output; {name} has others. "
            "Leave utility out."
        )


def _check_classes(outputs: Tensor, labels: Tensor, name: str) -> None:
    soft, few = is_soft(labels), labels[: len(outputs)]
    at = 1 if soft or outputs.dim() < 2 else class_dimension(outputs, few)
    if outputs.dim() < 2 or outputs.shape[at] < 2:
        raise NotApplicable(
            "accuracy needs a model with one score per class, not outputs of shape "
            f"{tuple(outputs.shape[1:])}. Leave utility out."
        )
    answers = outputs.shape[:at] + outputs.shape[at + 1 :]
    if not soft and (labels.dtype != torch.int64 or few.shape != answers):
        raise BadInput(
            f"labels of {name} must be whole numbers (int64), one per output, or soft rows (batch, "
            f"classes), not {labels.dtype} of shape {tuple(labels.shape)}. Convert them with "
            "labels.long()."
        )
    classes, counted = outputs.shape[at], labels if soft else labels[labels != IGNORED_LABEL]
    lowest, highest = (0, labels.shape[1] - 1) if soft else map(int, counted.aminmax())
    if highest >= classes or lowest < 0:
        raise BadInput(
            f"labels of {name} go from {lowest} to {highest}, but the model has the classes 0 to "
            f"{classes - 1}. Change the model or the labels."
        )


def _outputs(model: nn.Module, data: Batch, name: str) -> Tensor:
    """What the model returns for two samples; some models refuse a single one."""
    few = data[:2].to(torch.device("cpu"))
    args, kwargs = arguments(few.inputs)
    try:
        with torch.no_grad():
            return predictions(copy.deepcopy(model).cpu().eval()(*args, **kwargs))
    except RuntimeError as error:
        raise BadInput(
            f"the model does not accept the inputs of {name}, {types_of(data.inputs)} of shape "
            f"{shape_of(data.inputs)} ({told(error)}). Change the model or the data."
        ) from error
