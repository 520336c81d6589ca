"""A scenario as a channel: from one private sample to the update that is seen, before the noise hides any of it.

Only the strongest noise of a defense is unknown to the attacker: whatever else is random (mixing, dropout, the order of
batches, weaker noise) he is told. What happens to an update behind its noise can only take away from what it tells, and
is left out. Both make the attacker stronger than any real one, so that a bound for him holds for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprism.client.update import FedAvg
from fedprism.defenses import DpSgd, GaussianNoise, LaplaceNoise
from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.errors import FedprismError
from fedprism.pixels import to_inputs, to_pixels
from fedprism.simulation.federation import simulate
from fedprism.simulation.rounds import part_size, participation
from fedprism.simulation.scenario import Scenario
from fedprism.solvers.bounds.overlap import exact_doubt, gaussian_doubt, laplace_doubt
from fedprism.threats import ThreatModel, honest_but_curious
from fedprism.types import Batch, LossFn, Observation, Update

SAME = 1e-3
"""How far a sample's own gradient may be from its part in the batch's, relative: rounding is below 1e-5."""

UNNOISED = 1e9
"""What differences that no noise hides are multiplied by: larger than 1 in units of any noise."""

Noise = GaussianNoise | LaplaceNoise | DpSgd


@dataclass(frozen=True)
class Channel:
    """How the update depends on sample `row` of client `client`; all else stays as it is."""

    scenario: Scenario
    threat: ThreatModel
    seed: int
    client: int
    row: int
    noise: Noise | None
    deviations: tuple[float, ...]
    """Of the noise on each update that is seen; one per round, or per round and client."""
    device: str | torch.device | None = None

    def signal(self, pixels: Tensor) -> Tensor:
        """The updates that are seen, flat, in units of the noise; raw if there is none."""
        observation = self._observed(pixels)
        parts = [
            torch.cat([tensor.flatten().double() for tensor in observed.update.values()]) / deviation
            for observed, deviation in zip(observation.rounds, self.deviations, strict=True)
        ]
        return torch.cat([*parts, *_unnoised(observation)])

    def doubt(self, difference: Tensor) -> float:
        if self.noise is None:
            return exact_doubt(difference)
        if isinstance(self.noise, LaplaceNoise):
            return laplace_doubt(difference)
        return gaussian_doubt(float(difference.norm()))

    def pixels(self) -> Tensor:
        """The private sample, flat, in [0, 1]."""
        sample = self.scenario.clients[self.client].tensor[self.row : self.row + 1]
        return to_pixels(sample, self.scenario.bounds, self.scenario.normalization).flatten().float()

    def inputs(self, pixels: Tensor) -> Tensor:
        """Samples (count, d) in [0, 1] as the model is fed them."""
        data, (low, high) = self.scenario.clients[self.client].tensor, self.scenario.bounds
        shaped = pixels.view(-1, *data.shape[1:]) * (high - low) + low
        return to_inputs(shaped, self.scenario.normalization).to(data)

    def alone(self, other: Tensor) -> Channel:
        """The channel with this sample as the only one of its batch, if differences of updates are multiples of it.

        Whether they are is tried on the pair of the private sample and `other`; this one where they are not.
        """
        data = self.scenario.clients[self.client]
        others = [member for member in self.scenario.defense.members if not isinstance(member, DpSgd)]
        if sum(map(len, self.scenario.clients)) == 1 or chain(*others).overrides("on_draw", "on_batch", "on_update"):
            return self
        single = replace(
            self.scenario, clients=[data[self.row : self.row + 1]], participation=None, rounds=1, window=None,
            aggregation="mean", frozen=False,
        )  # fmt: skip
        only = replace(self, scenario=single, threat=honest_but_curious, client=0, row=0, deviations=(1.0,))
        together = self.signal(self.pixels()) - self.signal(other)
        try:
            apart = only.signal(self.pixels()) - only.signal(other)
        except FedprismError:  # batch norm in train mode, mixing: no batches of one
            return self
        if together.shape != apart.shape or not bool(apart.any()):
            return self
        factor = float(together @ apart / (apart @ apart))
        same = float((together - factor * apart).norm()) <= SAME * float(together.norm())
        return replace(only, deviations=(1 / abs(factor),)) if same and factor else self

    def _observed(self, pixels: Tensor) -> Observation:
        data = self.scenario.clients[self.client]
        inputs = data.tensor.clone()
        inputs[self.row] = self.inputs(pixels)[0]
        clients = list(self.scenario.clients)
        clients[self.client] = Batch(inputs, data.labels)
        return simulate(replace(self.scenario, clients=clients), self.threat, seed=self.seed, device=self.device)[0]


def channel(
    scenario: Scenario,
    threat: ThreatModel,
    seed: int,
    client: int,
    row: int,
    device: str | torch.device | None = None,
) -> Channel:
    """The channel from one sample of one client to what the threat model sees."""
    if scenario.defense.sums_only:
        threat = replace(threat, sees="aggregate")
    noise = strongest_noise(scenario, client)
    present = participation(scenario, seed).tolist()
    cohorts = [[number for number, takes_part in enumerate(cohort) if takes_part] for cohort in present]
    return Channel(
        replace(scenario, defense=_before(scenario, noise)), threat, seed, client, row, noise,
        tuple(value for cohort in cohorts for value in _deviations(scenario, threat, noise, client, cohort)), device,
    )  # fmt: skip


def strongest_noise(scenario: Scenario, client: int) -> Noise | None:
    """The member of the defense that adds most noise to a client's update; None where none adds any."""
    noisy = [member for member in scenario.defense.members if isinstance(member, Noise)]
    strongest = max(noisy, key=lambda member: _deviation(scenario, member, client), default=None)
    return strongest if strongest is not None and _deviation(scenario, strongest, client) > 0 else None


def has_relative_noise(scenario: Scenario) -> bool:
    """Whether a defense adds noise whose size depends on the update, which is no channel of known noise."""
    members = scenario.defense.members
    return any(isinstance(member, GaussianNoise | LaplaceNoise) and member.relative is not None for member in members)


def batch_length(scenario: Scenario, client: int) -> int:
    """The most samples that a client's step is the mean over; if there are fewer, there is more noise on the mean."""
    held, protocol = part_size(scenario, client), scenario.protocol
    return min(held, protocol.batch_size or held) if isinstance(protocol, FedAvg) else held


def _deviation(scenario: Scenario, noise: Noise, client: int) -> float:
    """The standard deviation of the noise on one client's update; under local training that of its last step.

    An optimizer that scales each entry by itself makes noise on gradients something that is not Gaussian: none counts.
    """
    if not isinstance(noise, DpSgd):
        return noise.std or 0.0
    if isinstance(scenario.protocol, FedAvg) and not scenario.protocol.optimizer.adds_gradients:
        return 0.0
    rate = scenario.protocol.lr if isinstance(scenario.protocol, FedAvg) else 1.0
    return rate * noise.noise * noise.clip / batch_length(scenario, client)


def _deviations(
    scenario: Scenario, threat: ThreatModel, noise: Noise | None, client: int, cohort: list[int]
) -> list[float]:
    """Of the noise on each update of a round that is seen, in the order of the observation."""
    if noise is None:
        return [1.0] * (len(cohort) if threat.sees == "client" else 1)
    if threat.sees == "client":
        return [_deviation(scenario, noise, number) for number in cohort]
    sizes = [part_size(scenario, number) for number in cohort]
    weighted, summed = scenario.aggregation == "weighted_mean", scenario.aggregation == "sum"
    total = sum(sizes) if weighted else 1 if summed and not threat.participates else len(cohort)
    # A participant knows its own noise. That of others adds up to Gaussian noise, but not to Laplacian.
    unknown = {number for number in cohort if number or not threat.participates}
    unknown &= {client} if isinstance(noise, LaplaceNoise) else unknown
    squares = [
        ((size if weighted else 1) / total * _deviation(scenario, noise, number)) ** 2
        for number, size in zip(cohort, sizes, strict=True)
        if number in unknown
    ]
    moved = scenario.protocol.lr if threat.participates and scenario.protocol.kind == "gradient" else 1.0
    return [moved * math.sqrt(math.fsum(squares)) or math.inf]


def _before(scenario: Scenario, noise: Noise | None) -> Defense:
    """The defense without this noise and all that comes behind it."""
    members = scenario.defense.members
    if noise is None:
        return scenario.defense
    place = next(number for number, member in enumerate(members) if member is noise)
    if isinstance(noise, DpSgd):
        # Local training goes on from noisy steps: there the same noise is on both sides, and cancels in the last step.
        kept = noise if isinstance(scenario.protocol, FedAvg) else noise.deterministic()
        return chain(*(kept if member is noise else _early(member) for member in members))
    return chain(*members[:place], *map(_early, members[place + 1 :]))


def _early(member: Defense) -> Defense:
    """What a member does before updates are noised."""
    if not member.overrides("on_update", "on_aggregate"):
        return member
    return _Early(member) if member.overrides("on_draw", "on_batch", "on_loss", "on_examples") else Chain()


@dataclass(frozen=True)
class _Early(Defense):
    """Only the early stages of a defense that also has late ones."""

    member: Defense

    def on_draw(self, dataset: Batch, context: Context, rng: torch.Generator) -> Tensor:
        return self.member.on_draw(dataset, context, rng)

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        return self.member.on_batch(batch, context, rng)

    def on_loss(self, loss: LossFn) -> LossFn:
        return self.member.on_loss(loss)

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        return self.member.on_examples(grads, context, rng)


def _unnoised(observation: Observation) -> list[Tensor]:
    """What depends on samples and is observed beside the updates, without noise: statistics of batch norm."""
    exact = observation.knowledge.batchnorm_exact or ()
    beside = [exact] if isinstance(exact, Mapping) else list(exact)
    beside += [observed.buffers_after for observed in observation.rounds if observed.buffers_after is not None]
    return [UNNOISED * tensor.flatten().double() for tensors in beside for tensor in tensors.values()]
