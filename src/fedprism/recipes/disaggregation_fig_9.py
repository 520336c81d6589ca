"""Figure 9: whether clients' data have a property, told from sums over ever more users and from each user's update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, Disaggregation, Negative, PropertyInference, then
from fedprism.randomness import generator
from fedprism.recipes import disaggregated, training
from fedprism.recipes.base import Announce, Outcome, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart
from fedprism.recipes.disaggregated import CENTRED

COHORTS, QUICK_COHORTS = (1, 2, 4, 8, 16, 32), (1, 4)
REPEATS = 10
IMAGES, QUICK_IMAGES = 32, 8
SHADOWS, QUICK_SHADOWS = 400, 100
WIDEST = 50_000
"""Every weight of LeNet: a rendering shows in its dense layers most."""
FEDAVG, QUICK_FEDAVG = fp.FedAvg(lr=1e-2, epochs=4, batch_size=8), fp.FedAvg(lr=1e-2, epochs=2, batch_size=4)
PUBLIC = 4
"""Of the images, one in this many belongs to the attacker in a quick run."""

AUC, ACCURACY = "AUC", "balanced accuracy"
SUMS, USERS = "sums", "disaggregated"
COHORT = "users in the sum"
SOUGHT = Negative()
NO_IDEA = 0.5
"""The answer for users whom disaggregation leaves out."""
PROPERTY = (
    "The property: half of one user's images are rendered as negatives, and nobody else's. The paper asks for an "
    "attribute of people in photographs of faces; a planted property serves the same purpose and harms nobody."
)
QUESTION = (
    "Sums: did the user with the property take part in this round? Disaggregated: is this the user? AUC is over all "
    "rounds or all users of a federation, then the mean over federations; balanced accuracy is at probability 0.5. "
    "Users whom disaggregation leaves out count as 0.5. The paper's numbers stand in a figure and are left out."
)
TRAINING = (
    f"{IMAGES} images a user, {FEDAVG.epochs} epochs of SGD with rate {FEDAVG.lr}, batches of {FEDAVG.batch_size}, "
    f"shuffled anew in every round; quick: {QUICK_IMAGES} images, {QUICK_FEDAVG.epochs} epochs, batches of "
    f"{QUICK_FEDAVG.batch_size}. Half of the users take part in every round."
)
ATTACKER = (
    "The attacker makes up clients from images of its own, adds them up to sums of as many users, and trains a random "
    "forest on them, as published: 100 trees, 5 samples a leaf at least. Unlike the published attack, it looks at wide "
    "layers too."
)


class World(NamedTuple):
    """The network, the users' images and the attacker's own."""

    model: nn.Module
    private: fp.data.ImageSet
    public: fp.data.ImageSet
    protocol: fp.FedAvg
    images: int


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    world = _world(settings)
    shadows = QUICK_SHADOWS if settings.quick else SHADOWS
    attack = PropertyInference(sought=SOUGHT, shadows=shadows, widest=WIDEST)
    for cohort in settings.sizes_or(COHORTS, QUICK_COHORTS):
        users = 2 * cohort
        rounds = disaggregated.enough_rounds(users, cohort)
        methods: dict[str, Attack] = {SUMS: attack, USERS: then(Disaggregation(certify=False), attack)}
        runs: dict[str, list[_Run]] = {name: [] for name in methods}
        for number in range(settings.batches_or(REPEATS)):
            announce(f"{users} users, {number + 1} of {settings.batches_or(REPEATS)}")
            seen = _observe(world, users, cohort, rounds, settings, number)
            for name, method in methods.items():
                runs[name].append(_run(name, method, seen, settings))
        entries = {name: _outcome(methods[name], runs[name]) for name in methods}
        yield Row(
            cell={"data": world.private.name, COHORT: cohort, "users": users, "rounds": rounds},
            entries=entries,
        )


def _world(settings: Settings) -> World:
    if settings.quick:
        everything = fp.data.load("photos")
        own = torch.arange(len(everything)) % PUBLIC == 0
        private, public = _part(everything, ~own), _part(everything, own)
    else:
        private, public = (
            fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("test", "train")
        )
    shape = tuple(private.images.shape[1:])
    model = fp.models.build("lenet5", input_shape=shape, classes=private.classes, seed=settings.seed)
    protocol, images = (QUICK_FEDAVG, QUICK_IMAGES) if settings.quick else (FEDAVG, IMAGES)
    return World(model, private, public, protocol, images)


def _part(images: fp.data.ImageSet, chosen: Tensor) -> fp.data.ImageSet:
    return fp.data.ImageSet(images.name, images.images[chosen], images.labels[chosen], images.class_names)


class _Seen(NamedTuple):
    observation: fp.Observation
    truth: fp.Truth
    victim: int


def _observe(world: World, users: int, cohort: int, rounds: int, settings: Settings, number: int) -> _Seen:
    """Secure sums of a federation in which half of one user's images, the victim's, have the property."""
    rng = generator(settings.seed, "property", users, number)
    batch = world.private.draw(users * world.images, rng)
    victim = int(torch.randint(users, (), generator=rng))
    first, half = victim * world.images, world.images // 2
    box = (torch.tensor(0.0), torch.tensor(1.0))
    batch.inputs[first : first + half] = SOUGHT.split(batch[first : first + half], box)[0].inputs
    shown = fp.Batch(training.normalised(batch.inputs, CENTRED), batch.labels)
    public = world.public.batch(torch.arange(len(world.public)))
    scenario = fp.Scenario(
        model=world.model,
        clients=disaggregated.dealt_out(shown, world.images),
        protocol=world.protocol,
        aggregation="sum",
        normalization=CENTRED,
        public_data=fp.Batch(training.normalised(public.inputs, CENTRED), public.labels),
        rounds=rounds,
        participation=disaggregated.cohorts(users, cohort, rounds, rng),
        frozen=True,
        window=disaggregated.GRANULARITY,
    )
    threat = fp.threats.secure_aggregation.granting("public_data")
    return _Seen(*fp.simulate(scenario, threat, seed=settings.seed + number, device=settings.device), victim)


class _Run(NamedTuple):
    auc: float
    accuracy: float
    seconds: float
    status: str


def _run(name: str, attack: Attack, seen: _Seen, settings: Settings) -> _Run:
    start = time.perf_counter()
    found = fp.run(attack, seen.observation, seed=settings.seed, device=settings.device)
    seconds = time.perf_counter() - start
    taken_part = seen.truth.participation
    assert taken_part is not None  # the simulator's truth has it
    told = found.properties.tolist() if found.properties is not None else []
    answers = dict(zip(found.owners or (), told, strict=True))
    if name == SUMS:
        asked = [f"round {number}" for number in range(len(taken_part))]
        marks = taken_part[:, seen.victim]
    else:
        asked = [f"client-{user}" for user in range(taken_part.shape[1])]
        marks = torch.arange(len(asked)) == seen.victim
    probabilities = torch.tensor([answers.get(who, NO_IDEA) for who in asked])
    auc = float(roc_auc_score(marks, probabilities))
    return _Run(auc, _balanced(marks, probabilities), seconds, found.status)


def _balanced(marks: Tensor, probabilities: Tensor) -> float:
    """The share of right answers at one half, each of the two kinds counting for half."""
    right = (probabilities > 0.5) == marks
    return float((right[marks].double().mean() + right[~marks].double().mean()) / 2)


def _outcome(attack: Attack, runs: Sequence[_Run]) -> Outcome:
    return Outcome(
        values={AUC: tuple(run.auc for run in runs), ACCURACY: tuple(run.accuracy for run in runs)},
        seconds=tuple(run.seconds for run in runs),
        statuses=tuple(run.status for run in runs),
        settings=repr(attack),
    )


def figure(rows: Sequence[Row]) -> str:
    """AUC by the number of users in a sum."""
    curves = {
        name: [
            (float(row.cell[COHORT]), entry.mean(AUC))
            for row in rows
            if isinstance(entry := row.entries[name], Outcome)
        ]
        for name in (SUMS, USERS)
    }
    return line_chart(curves, x=COHORT, y=AUC, log_x=True)


RECIPE = Recipe(
    name="disaggregation-fig-9",
    summary="Property inference on FedAvg updates of LeNet on CIFAR-10: AUC against the number of users in a sum",
    citation=f"{disaggregated.CITATION}, figure 9",
    shown=(AUC, ACCURACY),
    run=run,
    figure=figure,
    notes=(disaggregated.SUMS, PROPERTY, QUESTION, TRAINING, ATTACKER),
)
