"""What a defense costs: test accuracy and time a step of a network that is trained under it, and what an attack costs.

    def network(seed: int) -> nn.Module:
        return fp.models.build("resnet18", classes=10, seed=seed)

    print(utility.measure(network, train, test))
    print(utility.measure(network, train, test, fp.defenses.Prune(0.99)))

Training is that of clients who send one gradient a step: the gradient is the one that `client` computes for simulator
and attacks, and the defense meets it at the same stages. The server steps with momentum along what was sent, at a rate
that falls to zero along half a cosine, so that no images are held back to decide when to lower it.

The cost of an attack is the model of Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses
in Federated Learning", NeurIPS 2021 (table 3).
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from fedprism import devices, losses, progress, results
from fedprism.checks import whole
from fedprism.client import batch_gradient, example_gradients
from fedprism.defenses import (
    Cast,
    Chain,
    Clip,
    Context,
    Defense,
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    MseLoss,
    Prune,
    Quantize,
    SecureAggregation,
    SignCompression,
)
from fedprism.errors import BadInput
from fedprism.randomness import generator, seeded_layers
from fedprism.types import Batch, LossFn, Record, Update, is_soft

Factory: TypeAlias = Callable[[int], nn.Module]
"""seed -> a network that has not been trained."""

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""(inputs (count, *input_shape), rng) -> inputs of the same shape; rng lives on the CPU."""

CONFIDENCE = 0.95
WARM_UP = 3
"""Steps of each training that are not timed: the first ones allocate memory and choose algorithms."""
TESTED_TOGETHER = 512
MOST_EPOCHS = 10**6
PAIRED_ENCODINGS = 5_000
"""How many encodings the published time for pairing is about."""
ON_THE_MEAN = (Cast, Clip, GaussianNoise, LaplaceNoise, MseLoss, Prune, Quantize, SecureAggregation, SignCompression)
"""Defenses that see no data but through what the client is about to send; losses are the same for every example."""


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Utility:
    """What training under a defense came to.

    accuracies: the share of test inputs that are classified rightly, one network a seed. time_factor: the time of a
    step over that of a step without defense; None where it was not measured. epsilon: what DP-SGD guarantees every
    example over the whole training at `delta`; None where there is none, or another defense may undo it. Batches are
    shuffled, so it is larger than what is often stated, which holds only for batches drawn by a coin toss an example.
    """

    defense: Defense
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    steps: int
    time_factor: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    status: str = ""

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> Interval | None:
        """Where the mean of ever more seeds would lie, at 95 % (Student's t); a single seed does not tell."""
        found = t_interval(self.accuracies)
        return None if found is None else Interval(max(0.0, found.low), min(1.0, found.high))

    def record(self, cell: Mapping[str, object] | None = None) -> Record:
        """The line of a result; `cell` says what else was trained: network, data, settings."""
        return Record(
            kind="utility",
            cell={"defense": repr(self.defense), "steps": self.steps, **(cell or {})},
            scores={
                "accuracy": self.accuracies,
                "seeds": self.seeds,
                "interval": None if self.interval is None else tuple(self.interval),
                "delta": self.delta,
            },
            accuracy=self.accuracy,
            time_factor=self.time_factor,
            epsilon=self.epsilon,
            status=self.status,
            seed=self.seeds[0],
            versions=results.versions(),
        )

    def __str__(self) -> str:
        words = [f"{self.defense!r}: accuracy {self.accuracy:.1%}"]
        if self.interval is not None:
            words[0] += f" ({self.interval.low:.1%} to {self.interval.high:.1%})"
        if self.time_factor is not None:
            words.append(f"{self.time_factor:.2f} times the time a step")
        if self.epsilon is not None:
            words.append(f"epsilon {self.epsilon:.3g} at delta {self.delta:g}")
        return ", ".join([*words, *([self.status] if self.status else [])])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How networks are trained.

    In every step each of `clients` clients sends the gradient of `batch_size` samples, and the server moves along the
    mean. Clients draw from the same data. Samples left over when it does not divide into steps sit that epoch out.
    """

    epochs: int = 30
    batch_size: int = 128
    clients: int = 1
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    loss: str | LossFn = "cross_entropy"
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        whole(self.epochs, "epochs", MOST_EPOCHS)
        whole(self.batch_size, "batch_size", 2**31)
        whole(self.clients, "clients", 2**20)
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise BadInput(
                f"expected lr above 0, momentum in [0, 1) and weight_decay of at least 0, found {self.lr}, "
                f"{self.momentum} and {self.weight_decay}; change the one that is out of range."
            )

    def client_batch(self, samples: int) -> int:
        """How many samples a client's batch has: fewer than it should where the data is too small."""
        return min(self.batch_size, samples // self.clients)

    def steps_an_epoch(self, samples: int) -> int:
        return samples // (self.clients * self.client_batch(samples))


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

    `model` is a network, of which every seed trains a copy from the same weights, or a function from a seed to a
    network. Inputs are what the model is fed; `augment` changes those of `train` anew every epoch. In every step each
    of `clients` clients sends the gradient of `batch_size` samples. `timed_steps` steps with and without the defense
    are timed in turns; 0 leaves time_factor out. Nothing that is given is changed.
    """
    defense = defense or Chain()
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
        raise BadInput("expected at least one seed, found none; three show how much accuracies vary.")
    if not 0 < delta < 1:
        raise BadInput(f"expected delta between 0 and 1, found {delta}; 1e-5 is common, one over the data size most.")
    whole(timed_steps, "timed_steps", 10**6, 0)
    place, accuracies, strayed = devices.pick(device), list[float](), list[int]()
    _check(_network(model, seeds[0]), train, test)
    if len(train) < clients:
        raise BadInput(f"expected a sample for each of {clients} clients, found {len(train)}; give more data.")
    for number, seed in enumerate(seeds):
        network = fit(
            _network(model, seed),
            train,
            defense,
            schedule,
            seed=seed,
            device=place,
            done=number * epochs,
            total=len(seeds) * epochs,
        )
        right, finite = _tested(network, test, place)
        accuracies.append(right)
        if not finite:
            strayed.append(seed)
    epsilon = _epsilon(defense, epochs, delta)
    return Utility(
        defense=defense,
        seeds=tuple(seeds),
        accuracies=tuple(accuracies),
        steps=epochs * schedule.steps_an_epoch(len(train)),
        time_factor=_time_factor(model, train, defense, schedule, seeds[0], place, timed_steps),
        epsilon=epsilon,
        delta=None if epsilon is None else delta,
        status=f"training diverged with seed {', '.join(map(str, strayed))}; lower lr" if strayed else "",
    )


def fit(
    model: nn.Module,
    data: Batch,
    defense: Defense | None = None,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    done: int = 0,
    total: int | None = None,
) -> nn.Module:
    """Train the model in place under the defense and return it, where it was trained.

    Progress is reported in epochs: `done` of `total` lie behind, where this is one of several trainings.
    """
    schedule = schedule or Schedule()
    run = _Run(model, data, defense or Chain(), schedule, seed, devices.pick(device))
    with seeded_layers(generator(seed, "layers")):
        for epoch in range(schedule.epochs):
            for _ in run.epoch():
                pass
            progress.report(done + epoch + 1, total or schedule.epochs)
    for parameter in model.parameters():
        parameter.grad = None
    return model


class _Run:
    """One training. `epoch` yields after every step, so that two trainings can take turns."""

    def __init__(
        self, model: nn.Module, data: Batch, defense: Defense, schedule: Schedule, seed: int, place: torch.device
    ) -> None:
        # Convolutions of a GPU are fastest with the channels of a pixel side by side.
        self._format = torch.channels_last if place.type == "cuda" else torch.contiguous_format
        self.model = model.to(place)
        if place.type == "cuda" and data.inputs.dim() == 4:
            self.model.to(memory_format=self._format)
        self.model.train()
        self.data = Batch(data.inputs.to(place), data.labels.to(place))
        self.defense, self.schedule, self.place = defense, schedule, place
        self.loss = defense.on_loss(losses.resolve(schedule.loss))
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if not self.trained:
            raise BadInput("expected at least one parameter to train, found all frozen; unfreeze a layer.")
        # Batch norm writes into the buffers it is given: here they are the model's own, as training is to do.
        self.held: Update = {**self.frozen, **dict(model.named_buffers())}
        self.rng, self.order = generator(seed, "defense"), generator(seed, "order")
        self.augmenting = generator(seed, "augmentation")
        self.steps = 0
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)  # in the layout that a fused step asks for
        self.optimizer = torch.optim.SGD(
            self.trained.values(),
            lr=schedule.lr,
            momentum=schedule.momentum,
            weight_decay=schedule.weight_decay,
            fused=place.type in ("cpu", "cuda"),
        )

    def epoch(self) -> Iterator[None]:
        """Every step of one pass over the data, augmented as a whole so that whatever is mixed in is augmented too."""
        augment = self.schedule.augment
        inputs = self.data.inputs if augment is None else augment(self.data.inputs, self.augmenting)
        seen = Batch(inputs, self.data.labels)
        for batches in self._rounds(seen):
            self._step([self._answer(seen, indices, client) for client, indices in enumerate(batches)])
            yield

    def _rounds(self, seen: Batch) -> Iterator[list[Tensor]]:
        """Each client's samples, round by round: everyone's once an epoch or, where the defense draws, as it draws."""
        clients, size = self.schedule.clients, self.schedule.client_batch(len(seen))
        for number in range(self.schedule.steps_an_epoch(len(seen))):
            if _draws(self.defense):
                yield [self._drawn(seen, client, size) for client in range(clients)]
                continue
            if number == 0:
                order = torch.randperm(len(seen), generator=self.order)
            yield list(torch.split(order[number * clients * size : (number + 1) * clients * size], size))

    def _drawn(self, seen: Batch, client: int, size: int) -> Tensor:
        drawn = self.defense.on_draw(seen, self._context(client), self.rng)
        return drawn[torch.randperm(len(drawn), generator=self.order)[:size]]

    def _answer(self, seen: Batch, indices: Tensor, client: int) -> Update:
        """What a client sends that trains on these samples."""
        context = self._context(client)
        own = seen[indices.to(self.place)]
        within = replace(context, batch=seen, indices=indices, step=0)
        batch = self.defense.on_batch(own, within, self.rng)
        if batch.inputs.dim() == 4:
            batch = Batch(batch.inputs.contiguous(memory_format=self._format), batch.labels)
        if self.defense.per_example:
            each = example_gradients(self.model, self.trained, self.held, batch, self.loss)
            gradient: Update = {name: g.mean(0) for name, g in self.defense.on_examples(each, within, self.rng).items()}
        else:
            gradient = batch_gradient(self.model, self.trained, self.held, batch, self.loss)
        return self.defense.on_update(gradient, replace(context, batch=own), self.rng)

    def _step(self, sent: Sequence[Update]) -> None:
        """Along the mean of what was sent, at the rate of this step."""
        total = self.schedule.epochs * self.schedule.steps_an_epoch(len(self.data))
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, self.steps / total)))
        sent = self.defense.on_aggregate(sent, self._context(None), self.rng)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                assert parameter.grad is not None
                parameter.grad.copy_(sent[0][name] if len(sent) == 1 else _mean(update[name] for update in sent))
        self.optimizer.step()
        self.steps += 1

    def _context(self, client: int | None) -> Context:
        return Context(
            model=self.model,
            params={**self.frozen, **self.trained},
            client=None if client is None else f"client-{client}",
            round=self.steps,
        )


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _draws(defense: Defense) -> bool:
    """Whether the defense has a say in which samples form a batch."""
    parts = defense.defenses if isinstance(defense, Chain) else (defense,)
    return any(type(part).on_draw is not Defense.on_draw for part in parts)


def _network(model: nn.Module | Factory, seed: int) -> nn.Module:
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model(seed)


def _tested(model: nn.Module, data: Batch, place: torch.device) -> tuple[float, bool]:
    """The share of inputs that the model gets right, and whether all its outputs are finite."""
    model.eval()
    right, finite = 0, True
    with torch.no_grad():
        for start in range(0, len(data), TESTED_TOGETHER):
            part = data[start : start + TESTED_TOGETHER]
            outputs, labels = model(part.inputs.to(place)), part.labels.to(place)
            right += int((outputs.argmax(1) == (labels.argmax(1) if is_soft(labels) else labels)).sum())
            finite = finite and bool(torch.isfinite(outputs).all())
    return right / len(data), finite


def _time_factor(
    model: nn.Module | Factory,
    data: Batch,
    defense: Defense,
    schedule: Schedule,
    seed: int,
    place: torch.device,
    timed: int,
) -> float | None:
    """The median time of a defended step over that of a step without defense.

    The two trainings take turns, so that whatever else slows the machine down meanwhile meets both.
    """
    if defense == Chain():
        return 1.0
    if timed == 0:
        return None
    runs = [_Run(_network(model, seed), data, d, schedule, seed, place) for d in (defense, Chain())]
    with seeded_layers(generator(seed, "layers")):
        endless = [_endless(run) for run in runs]
        for _ in range(WARM_UP):
            for steps in endless:
                next(steps)
        # Whoever comes second may find the machine better prepared: that alternates.
        pairs = [{k: _seconds(endless[k], place) for k in ((0, 1), (1, 0))[pair % 2]} for pair in range(timed)]
    return statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)


def _endless(run: _Run) -> Iterator[None]:
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


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval for the mean of what the values were drawn from; None for fewer than two values."""
    if len(values) < 2:
        return None
    margin = (
        statistics.stdev(values) / math.sqrt(len(values)) * float(student.ppf(0.5 + confidence / 2, len(values) - 1))
    )
    mean = statistics.fmean(values)
    return Interval(mean - margin, mean + margin)


def _epsilon(defense: Defense, epochs: int, delta: float) -> float | None:
    """What DP-SGD guarantees each example over a training whose batches are shuffled.

    An example is in one batch an epoch, and what is computed from later batches tells nothing more about it: that makes
    `epochs` releases. What works on the mean alone leaves the guarantee as it is. Anything else may undo it, by putting
    an example behind several gradients or by looking at the data once more, and then nothing is claimed.
    """
    parts = defense.defenses if isinstance(defense, Chain) else (defense,)
    private = [part for part in parts if isinstance(part, DpSgd)]
    others = [part for part in parts if not isinstance(part, DpSgd)]
    if len(private) != 1 or private[0].noise == 0 or not all(isinstance(part, ON_THE_MEAN) for part in others):
        return None
    return private[0].epsilon(delta=delta, steps=epochs)


def _check(model: nn.Module, train: Batch, test: Batch) -> None:
    """Both sets are fit to be fed to the model, one sample of each is, and every label is one of its classes."""
    for name, data in (("train", train), ("test", test)):
        if len(data.inputs) == 0 or len(data.inputs) != len(data.labels):
            raise BadInput(
                f"expected as many labels as inputs and at least one of each in {name}, found {len(data.inputs)} "
                f"inputs and {len(data.labels)} labels; check that set."
            )
        if data.labels.dtype != torch.int64 and not is_soft(data.labels):
            raise BadInput(
                f"expected labels of {name} as whole numbers (int64) or soft rows (batch, classes), found "
                f"{data.labels.dtype} of shape {tuple(data.labels.shape)}; convert with labels.long()."
            )
        try:
            with torch.no_grad():
                classes = copy.deepcopy(model).cpu().eval()(data.inputs[:1].cpu()).shape[-1]
        except RuntimeError as error:
            raise BadInput(
                f"expected inputs of {name} that the model accepts, found {data.inputs.dtype} of shape "
                f"{tuple(data.inputs.shape[1:])} ({str(error).splitlines()[0]}); change the model or the data."
            ) from error
        highest = data.labels.shape[1] - 1 if is_soft(data.labels) else int(data.labels.max())
        if highest >= classes or (not is_soft(data.labels) and int(data.labels.min()) < 0):
            raise BadInput(
                f"expected labels of {name} from 0 to {classes - 1}, the model's classes, found them from "
                f"{0 if is_soft(data.labels) else int(data.labels.min())} to {highest}; change the model or the labels."
            )


class AttackCost(NamedTuple):
    """GPU hours of each part of an attack on data that was mixed, end to end."""

    inversion: float
    """recovering the private encodings from gradients"""
    examples: float
    """recovering encodings of known images, to learn from what recovered encodings look like"""
    network: float
    """training the network that tells which encodings share an image"""
    pairing: float
    """asking it about every pair of private encodings"""

    @property
    def total(self) -> float:
        return sum(self)


def attack_cost(
    images: int,
    *,
    epochs: int = 50,
    batch_size: int = 128,
    hours_a_batch: float = 0.25,
    examples: int = 10_000,
    network_hours: float = 10.0,
    pairing_hours: float = 1 / 6,
) -> AttackCost:
    """GPU hours until `images` private images that were mixed anew in each of `epochs` epochs are recovered.

    (N T / b) t + (n / b) t + 10 + (N T / 5000)² / 6 hours, the published model with its numbers as defaults: inverting
    a batch of b takes t hours, and pairing 5,000 encodings `pairing_hours`. Fractions of a batch count as such. The
    part that grows with the square of the data is what makes the attack expensive, not the inversion of gradients.
    """
    for name, number in (("images", images), ("epochs", epochs), ("batch_size", batch_size)):
        whole(number, name, 2**53)
    whole(examples, "examples", 2**53, 0)
    hours = {"hours_a_batch": hours_a_batch, "network_hours": network_hours, "pairing_hours": pairing_hours}
    for name, value in hours.items():
        if not 0 <= value < math.inf:
            raise BadInput(f"expected {name} to be a number of at least 0, found {value}; give the hours it takes.")
    encodings = images * epochs
    return AttackCost(
        inversion=encodings / batch_size * hours_a_batch,
        examples=examples / batch_size * hours_a_batch,
        network=network_hours,
        pairing=pairing_hours * (encodings / PAIRED_ENCODINGS) ** 2,
    )
