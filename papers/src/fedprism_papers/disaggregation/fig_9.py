"""Figure 9: whether clients' data have a property, told from sums over ever more users and from each user's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, Disaggregation, Negative, PropertyInference, then
from fedprism.pixels import to_inputs
from fedprism.randomness import generator
from fedprism_papers.disaggregation import federation as federations
from fedprism_papers.disaggregation.federation import CENTRED
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings, curve
from fedprism_papers.shared.cells import Attacked, AttackTrial, attack_cell
from fedprism_papers.shared.charts import line_chart
from fedprism_papers.shared.measuring import Scores
from fedprism_papers.shared.victims import part

COHORTS, QUICK_COHORTS = (1, 2, 4, 8, 16, 32), (1, 4)  # users in a sum
REPEATS = 10  # repetitions per cohort size
IMAGES, QUICK_IMAGES = 32, 8  # per user
SHADOWS, QUICK_SHADOWS = 400, 100  # updates that the attacker makes to learn from
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
        rounds = federations.enough_rounds(users, cohort)
        methods: dict[str, Attack] = {SUMS: attack, USERS: then(Disaggregation(certify=False), attack)}
        attacked = SumsWithVictim(world=world, size=cohort, rounds=rounds, batches=settings.batches_or(REPEATS))
        entries = attack_cell(attacked, methods, settings, announce, f"{users} users").entries
        yield Row(cell={"data": world.private.name, COHORT: cohort, "users": users, "rounds": rounds}, entries=entries)


def _world(settings: Settings) -> World:
    if settings.quick:
        everything = fp.data.load("photos")
        attackers = torch.arange(len(everything)) % PUBLIC == 0
        private, public = part(everything, ~attackers), part(everything, attackers)
    else:
        private, public = (
            fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("test", "train")
        )
    shape = tuple(private.images.shape[1:])
    model = fp.models.build("lenet5", input_shape=shape, classes=private.classes, seed=settings.seed)
    protocol, images = (QUICK_FEDAVG, QUICK_IMAGES) if settings.quick else (FEDAVG, IMAGES)
    return World(model, private, public, protocol, images)


@dataclass(frozen=True, kw_only=True, eq=False)
class SumsWithVictim(Attacked):
    """Secure sums of federations in which half of one user's images, the victim's, have the property."""

    world: World
    size: int
    rounds: int
    batches: int

    def observe(self, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, tuple[fp.Truth, int]]:
        """The truth is with the number of the victim."""
        world, users = self.world, 2 * self.size
        rng = generator(settings.seed, "property", users, number)
        batch = world.private.draw(users * world.images, rng)
        victim = int(torch.randint(users, (), generator=rng))
        first, half = victim * world.images, world.images // 2
        box = (torch.tensor(0.0), torch.tensor(1.0))
        batch.tensor[first : first + half] = SOUGHT.split(batch[first : first + half], box)[0].tensor
        private = fp.Batch(to_inputs(batch.tensor, CENTRED), batch.labels)
        public = world.public.batch(torch.arange(len(world.public)))
        scenario = fp.Scenario(
            model=world.model,
            clients=federations.dealt_out(private, world.images),
            protocol=world.protocol,
            aggregation="sum",
            normalization=CENTRED,
            public_data=fp.Batch(to_inputs(public.tensor, CENTRED), public.labels),
            rounds=self.rounds,
            participation=federations.cohorts(users, self.size, self.rounds, rng),
            frozen=True,
            window=federations.GRANULARITY,
        )
        threat = fp.threats.secure_aggregation.granting("public_data")
        observation, truth = fp.simulate(scenario, threat, seed=settings.seed + number, device=settings.device)
        return observation, (truth, victim)

    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: tuple[fp.Truth, int]) -> Scores:
        participation, victim = truth[0].participation, truth[1]
        assert participation is not None  # the simulator's truth has it
        properties = answer.properties.tolist() if answer.properties is not None else []
        answers = dict(zip(answer.owners or (), properties, strict=True))
        if isinstance(trial.attack, PropertyInference):
            asked = [f"round {number}" for number in range(len(participation))]
            marks = participation[:, victim]
        else:
            asked = [f"client-{user}" for user in range(participation.shape[1])]
            marks = torch.arange(len(asked)) == victim
        probabilities = torch.tensor([answers.get(who, NO_IDEA) for who in asked])
        auc = float(roc_auc_score(marks, probabilities))
        return Scores({AUC: auc, ACCURACY: balanced(marks, probabilities)}, {})


def balanced(marks: Tensor, probabilities: Tensor) -> float:
    """The fraction of right answers at one half, each of the two kinds counting for half."""
    right = (probabilities > 0.5) == marks
    return float((right[marks].double().mean() + right[~marks].double().mean()) / 2)


def figure(rows: Sequence[Row]) -> str:
    """AUC by the number of users in a sum."""
    curves = {name: curve(rows, COHORT, name, lambda entry: entry.mean(AUC)) for name in (SUMS, USERS)}
    return line_chart(curves, x=COHORT, y=AUC, log_x=True)


RECIPE = Recipe(
    name="disaggregation-fig-9",
    summary="Property inference on FedAvg updates of LeNet on CIFAR-10: AUC against the number of users in a sum",
    citation=f"{federations.CITATION}, figure 9",
    shown=(AUC, ACCURACY),
    run=run,
    options=("sizes", "batches"),
    figure=figure,
    notes=(federations.SUMS, PROPERTY, QUESTION, TRAINING, ATTACKER),
)
