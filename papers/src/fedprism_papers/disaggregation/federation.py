"""Federations with secure sums, and attacks on their sums and on single users after disaggregation.

Lam, Wei, Brooks, Reddi, Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", ICML 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, Disaggregation, then
from fedprism.attacks.reduction import Reduced, Then
from fedprism.client.update import Protocol
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator
from fedprism_papers.shared.base import Announce, Entry, Settings
from fedprism_papers.shared.cells import Attacked, AttackTrial, attack_cell, by_metric
from fedprism_papers.shared.measuring import ANSWERED, OVER_40_DB, SHOWN_IMAGES, Scores, samples_of, score_images

CITATION = "Lam et al., Gradient Disaggregation, ICML 2021"
GRANULARITY = 10
"""Rounds over which device analytics count each user's participation."""
CENTRED: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SUMS = (
    "Secure aggregation: the server sees sums over cohorts drawn anew in every round, sends the same model every time, "
    f"and knows how often each user took part in every {GRANULARITY} rounds. It is not told who took part when."
)
SCORED = (
    "PSNR is after the best one-to-one assignment of recovered to private images; after disaggregation within each "
    "user: an image counts only if it was recovered as its owner's."
)


def images(name: str, settings: Settings) -> fp.data.ImageSet:
    """The test images of a data set, or the embedded photographs for a quick run."""
    return fp.data.load("photos") if settings.quick else fp.data.load(name, split="test", data_dir=settings.data_dir)


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """`users` of whom `cohort` take part in every round, each with `images` images of its own."""

    model: nn.Module
    data: fp.data.ImageSet
    users: int
    cohort: int
    rounds: int
    images: int
    protocol: Protocol
    normalization: Normalization

    def clients(self, settings: Settings, number: int) -> list[fp.Batch]:
        """What the users hold: different images, dealt out at random."""
        rng = generator(settings.seed, "users", self.users, self.cohort, number)
        batch = self.data.draw(self.users * self.images, rng)
        inputs = to_inputs(batch.tensor, self.normalization)
        return dealt_out(fp.Batch(inputs, batch.labels), self.images)

    def all_rounds(self, clients: Sequence[fp.Batch], settings: Settings, number: int) -> fp.Scenario:
        """All rounds, with the same number of users in each."""
        rng = generator(settings.seed, "cohorts", self.users, self.cohort, number)
        participation = cohorts(self.users, self.cohort, self.rounds, rng)
        return dataclasses.replace(
            self.one_round(clients), rounds=self.rounds, participation=participation, frozen=True, window=GRANULARITY
        )

    def one_round(self, clients: Sequence[fp.Batch]) -> fp.Scenario:
        return fp.Scenario(
            model=self.model,
            clients=clients,
            protocol=self.protocol,
            normalization=self.normalization,
            aggregation="sum",
        )


def dealt_out(batch: fp.Batch, images: int) -> list[fp.Batch]:
    """The batch in parts of as many images."""
    return [batch[part] for part in torch.split(torch.arange(len(batch)), images)]


def cohorts(users: int, cohort: int, rounds: int, rng: torch.Generator) -> Tensor:
    """(rounds, users) bool: a random `cohort` of the users in every round."""
    drawn = torch.rand(rounds, users, generator=rng).argsort(dim=1)
    return drawn < cohort


def enough_rounds(users: int, cohort: int) -> int:
    """Rounds that let counts in windows of ten tell all users apart: more where many take part, or few are there."""
    a_user = 4 if 5 * cohort > users else 2
    return max(6 * GRANULARITY, min(6 * users, 12 * GRANULARITY), a_user * users)


@dataclass(frozen=True, kw_only=True, eq=False)
class SumsAndUsers(Attacked):
    """One round's sum and, for attacks behind a disaggregation, the first `size` users of all rounds."""

    federation: Federation
    size: int
    batches: int

    needs_lpips: ClassVar[bool] = True

    def sent(self, attack: Attack) -> str:
        return "all rounds" if isinstance(attack, Then) else "one round"

    def observe(self, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, fp.Truth]:
        federation = self.federation
        clients = federation.clients(settings, number)
        scenario = (
            federation.all_rounds(clients, settings, number)
            if isinstance(attack, Then)
            else federation.one_round(clients[: federation.cohort])
        )
        seed = settings.seed + number
        return fp.simulate(scenario, fp.threats.secure_aggregation, seed=seed, device=settings.device)

    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: fp.Truth) -> Scores:
        if isinstance(trial.attack, Then):
            return score_users(answer, truth, trial.settings, self.size)
        return score_images(answer, truth, trial.settings)


@dataclass(frozen=True, kw_only=True, repr=False)
class FirstUsers(Disaggregation):
    """Disaggregation that hands on the first `users` only, because attacking all of them would take too long."""

    users: int

    def explained(self, observation: fp.Observation) -> Reduced:
        reduced = super().explained(observation)
        wanted = {f"client-{user}" for user in range(self.users)}
        return reduced._replace(parts=tuple(part for part in reduced.parts if part.subject in wanted))


def attack_federation(
    federation: Federation,
    on_sum: Mapping[str, Attack],
    on_users: Mapping[str, Attack],
    settings: Settings,
    announce: Announce,
    *,
    attacked: int,
    repeats: int,
) -> dict[str, Entry]:
    """What methods make of one round's sum, and of the first `attacked` users after all rounds are disaggregated."""
    reduction = FirstUsers(users=attacked, certify=False)
    methods = {**on_sum, **{name: then(reduction, attack) for name, attack in on_users.items()}}
    cell = SumsAndUsers(federation=federation, size=attacked, batches=repeats)
    title = f"{federation.cohort} of {federation.users} users"
    return attack_cell(cell, methods, settings, announce, title).entries


def score_users(answer: fp.Reconstruction, truth: fp.Truth, settings: Settings, users: int) -> Scores:
    """Means over the users; an image counts only if it was recovered as its owner's."""
    scores = list[Scores]()
    for name in (f"client-{user}" for user in range(users)):
        rows = [row for row, owner in enumerate(answer.owners or ()) if owner == name]
        samples = [row for row, owner in enumerate(truth.owners) if owner == name]
        inputs = answer.tensor[rows] if answer.inputs is not None else None
        one = dataclasses.replace(answer, inputs=inputs, labels=None)
        scores.append(score_images(one, samples_of(truth, samples), settings))
    values = by_metric([user.values or {OVER_40_DB: 0.0, ANSWERED: 0.0} for user in scores])
    means = {metric: sum(each) / len(each) for metric, each in values.items()}
    pictures = [user.tensors for user in scores if user.tensors]
    shown = max(1, SHOWN_IMAGES // max(1, len(pictures)))
    sides = ("originals", "recovered") if pictures else ()
    return Scores(means, {side: torch.cat([pair[side][:shown] for pair in pictures])[:SHOWN_IMAGES] for side in sides})
