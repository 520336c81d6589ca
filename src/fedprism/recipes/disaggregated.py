"""What the recipes of inference after disaggregation share: federations with secure sums, and attacks on single users.

Lam, Wei, Brooks, Reddi, Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", ICML 2021.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Attack, Disaggregation, Reduced, then
from fedprism.client import Protocol
from fedprism.errors import out_of_memory
from fedprism.pixels import Normalization
from fedprism.randomness import generator
from fedprism.recipes import training
from fedprism.recipes.base import Announce, Entry, Outcome, Settings
from fedprism.recipes.measuring import FAITHFUL, NOT_APPLICABLE, OUT_OF_MEMORY, SHOWN_IMAGES, score_images

CITATION = "Lam et al., Gradient Disaggregation, ICML 2021"
GRANULARITY = 10
"""Rounds over which device analytics count each user's participation."""
ANSWERED = "answered"
CENTRED: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SUMS = (
    "Secure aggregation: the server sees sums over cohorts drawn anew in every round, sends the same model every time, "
    f"and knows how often each user took part in every {GRANULARITY} rounds. It is not told who took part when."
)
SCORED = (
    "PSNR is after the best one-to-one assignment of recovered to private images; after disaggregation within each "
    "user: an image counts only where it was found with its owner."
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
        inputs = training.normalised(batch.inputs, self.normalization)
        return dealt_out(fp.Batch(inputs, batch.labels), self.images)

    def all_rounds(self, clients: Sequence[fp.Batch], settings: Settings, number: int) -> fp.Scenario:
        """All rounds, with the same number of users in each."""
        rng = generator(settings.seed, "cohorts", self.users, self.cohort, number)
        return fp.Scenario(
            model=self.model,
            clients=clients,
            protocol=self.protocol,
            normalization=self.normalization,
            aggregation="sum",
            rounds=self.rounds,
            participation=cohorts(self.users, self.cohort, self.rounds, rng),
            frozen=True,
            window=GRANULARITY,
        )

    def one_round(self, clients: Sequence[fp.Batch]) -> fp.Scenario:
        """A single round of the first `cohort` users, who are its only ones."""
        return fp.Scenario(
            model=self.model,
            clients=clients[: self.cohort],
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


@dataclass(frozen=True, kw_only=True, repr=False)
class OfUsers(Disaggregation):
    """Disaggregation that hands on the first few users only, where attacking all of them would take too long."""

    users: int

    def explained(self, observation: fp.Observation) -> Reduced:
        found = super().explained(observation)
        wanted = {f"client-{user}" for user in range(self.users)}
        return found._replace(parts=tuple(part for part in found.parts if part.subject in wanted))


def play(
    federation: Federation,
    on_sum: Mapping[str, Attack],
    on_users: Mapping[str, Attack],
    settings: Settings,
    announce: Announce,
    *,
    attacked: int,
    repeats: int,
) -> dict[str, Entry]:
    """What methods make of one round's sum, and of the first `attacked` users after all rounds are disaggregated.

    A method that does not apply or runs out of memory is left at that word.
    """
    runs: dict[str, list[_Run]] = {name: [] for name in (*on_sum, *on_users)}
    methods = {
        **on_sum,
        **{name: then(OfUsers(users=attacked, certify=False), attack) for name, attack in on_users.items()},
    }
    failed: dict[str, str] = {}
    for number in range(repeats):
        clients = federation.clients(settings, number)
        for scenario, names in (
            (federation.one_round(clients), on_sum),
            (federation.all_rounds(clients, settings, number), on_users),
        ):
            if not names:
                continue
            announce(f"{federation.users} users, {number + 1} of {repeats}: clients")
            observation, truth = fp.simulate(
                scenario, fp.threats.secure_aggregation, seed=settings.seed + number, device=settings.device
            )
            for name in names:
                announce(f"{federation.users} users, {number + 1} of {repeats}: {name}")
                try:
                    runs[name].append(_run(methods[name], observation, truth, settings, attacked, name in on_users))
                except fp.NotApplicable:
                    failed[name] = NOT_APPLICABLE
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    failed[name] = OUT_OF_MEMORY
    return {name: failed.get(name) or _outcome(methods[name], runs[name]) for name in runs}


class _Run(NamedTuple):
    values: dict[str, float]
    seconds: float
    status: str
    pictures: tuple[Tensor, Tensor] | None


def _run(
    attack: Attack, observation: fp.Observation, truth: fp.Truth, settings: Settings, attacked: int, by_user: bool
) -> _Run:
    start = time.perf_counter()
    found = fp.run(attack, observation, seed=settings.seed, device=settings.device)
    seconds = time.perf_counter() - start  # the result lies on the CPU: a GPU has been waited for
    if by_user:
        values, pictures = _score_users(found, truth, settings, attacked)
    else:
        values, pictures = score_images(found, truth, settings)
    return _Run(values, seconds, str(found.status), pictures)


def _score_users(
    found: fp.Reconstruction, truth: fp.Truth, settings: Settings, attacked: int
) -> tuple[dict[str, float], tuple[Tensor, Tensor] | None]:
    """Means over the users; an image counts only where it was found with its owner."""
    scores, shown = list[dict[str, float]](), list[tuple[Tensor, Tensor]]()
    for name in (f"client-{user}" for user in range(attacked)):
        rows = [row for row, owner in enumerate(found.owners or ()) if owner == name]
        samples = [row for row, owner in enumerate(truth.owners) if owner == name]
        own = dataclasses.replace(found, inputs=found.inputs[rows] if found.inputs is not None else None, labels=None)
        private = dataclasses.replace(
            truth, inputs=truth.inputs[samples], labels=truth.labels[samples], owners=(name,) * len(samples)
        )
        values, pictures = score_images(own, private, settings)
        scores.append(values or {FAITHFUL: 0.0, ANSWERED: 0.0})
        shown += [pictures] if pictures is not None else []
    metrics = dict.fromkeys(metric for values in scores for metric in values)
    means = {
        metric: sum(present) / len(present)
        for metric in metrics
        if (present := [values[metric] for values in scores if metric in values])
    }
    if not shown:
        return means, None
    each = max(1, SHOWN_IMAGES // len(shown))
    originals, recovered = (torch.cat([pair[side][:each] for pair in shown])[:SHOWN_IMAGES] for side in (0, 1))
    return means, (originals, recovered)


def _outcome(attack: Attack, runs: Sequence[_Run]) -> Outcome:
    metrics = dict.fromkeys(metric for run in runs for metric in run.values)
    return Outcome(
        values={m: tuple(run.values[m] for run in runs if m in run.values) for m in metrics},
        seconds=tuple(run.seconds for run in runs),
        statuses=tuple(run.status for run in runs),
        settings=repr(attack),
        pictures=runs[0].pictures,
    )
