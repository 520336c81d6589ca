"""What a client sees of the others: how the global model moved, less what it added to that itself.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021
(section 1), name the client that watches the global model among the attackers; with two clients the difference of two
global models is the other's update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism import losses
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.attacks.reduction import Reduced, Reduction
from fedprism.client.batchnorm import buffers_of
from fedprism.client.observed import adds_gradients, as_delta, as_gradient, known_training
from fedprism.client.update import FedSGD, local_update
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.types import Batch, Knowledge, Observation, Round, Update


class OthersStatus(StrEnum):
    ONE = "what is left is the update of the one other client"
    SEVERAL = "what is left is the mean of several other clients' updates: whose a sample is stays unknown"


@dataclass(frozen=True, kw_only=True, repr=False)
class OtherClients(Reduction):
    """The mean of the other clients' updates, one a round, out of the movement of the global model.

    The client knows its own data (`public_data`) and repeats its own training on it; it is the first client, and took
    part in every round unless the participation is known and says otherwise. single_step: clients of SGD are taken to
    train in one step on all that they have, where the local epochs do not say otherwise; the update is then a mean
    gradient, which more attacks can read.

    Its own share is exact where its training has no chance in it: a random order of batches and noise are not repeated.
    """

    single_step: bool = True

    citation: ClassVar[str] = "Huang et al. 2021 (the curious client)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "loss", "public_data", "local_lr"})

    @property
    def uses(self) -> frozenset[str]:
        return FORWARD_USES | {"participation", "examples", "batch_size", "labels"}

    def reduce(self, observation: Observation) -> tuple[Observation, ...]:
        return self.explained(observation).parts

    def explained(self, observation: Observation) -> Reduced:
        parts, statuses, counts = list[Observation](), dict[str, None](), list[int]()
        for number, round in enumerate(observation.rounds):
            if not any(bool(moved.any()) for moved in round.update.values()):
                raise NotApplicable(
                    f"the curious client needs a global model that moves, but it did not in round {round.index}; "
                    "leave that round out."
                )
            cohort = _cohort(observation, round, number)
            if cohort.others == 0:
                continue
            parts.append(self._without_own(observation, round, number, cohort))
            counts.append(cohort.others)
            statuses[OthersStatus.ONE if cohort.others == 1 else OthersStatus.SEVERAL] = None
        if not parts:
            raise NotApplicable(
                "the curious client needs a round in which others took part, but there is none; add clients or rounds."
            )
        if not _repeatable(observation):
            statuses["its own share is repeated up to chance (order of batches, noise)"] = None
        return Reduced(tuple(parts), "; ".join(statuses), {"other_clients": counts})

    def _without_own(self, observation: Observation, round: Round, number: int, cohort: _Cohort) -> Observation:
        knowledge, rate = observation.knowledge, observation.knowledge.local_lr or 0.0
        summed = adds_gradients(round, knowledge) is True
        gradient = self.single_step and summed and (knowledge.local_epochs or 1) == 1
        own_update = _own_update(observation, round) if cohort.took_part else {}
        own_share, update = cohort.own_share, dict(round.update)
        if own_update:
            update = {name: moved - own_share * own_update[name] for name, moved in update.items()}
        update = {name: moved / (1 - own_share) for name, moved in update.items()}
        if gradient:
            update = dict(as_gradient(update, rate))
        rest = replace(
            round,
            update=update,
            kind="gradient" if gradient else "delta",
            clients=cohort.others,
            participants=None,
            examples=None,
            buffers_after=None,
        )
        alone = cohort.others == 1 and round.clients == 2
        return replace(
            observation,
            rounds=(rest,),
            subject="client-1" if alone else None,
            knowledge=_about_others(knowledge, number, len(_own_data(knowledge)) if cohort.took_part else 0),
        )


class _Cohort(NamedTuple):
    others: int
    took_part: bool
    own_share: float
    """The weight of the client's own update in the mean."""


def _cohort(observation: Observation, round: Round, number: int) -> _Cohort:
    """Who is behind a round: everyone, unless the participation is known."""
    knowledge, clients = observation.knowledge, round.clients
    present = torch.ones(clients, dtype=torch.bool)
    if knowledge.participation is not None:
        if knowledge.participation.dim() != 2 or len(knowledge.participation) != len(observation.rounds):
            raise BadInput(
                f"participation must have the shape {len(observation.rounds)} rounds x clients, not "
                f"{tuple(knowledge.participation.shape)}; correct it."
            )
        present = knowledge.participation[number].bool().cpu()
    took_part, others = bool(present[:1].any()), int(present[1:].sum())
    if round.reduction == "weighted_mean" and took_part:
        if knowledge.examples is None or len(knowledge.examples) != len(present):
            raise MissingKnowledge("the curious client's share in a weighted mean", "examples")
        total = sum(size for size, there in zip(knowledge.examples, present.tolist(), strict=True) if there)
        return _Cohort(others, took_part, knowledge.examples[0] / total)
    return _Cohort(others, took_part, 1 / (others + 1) if took_part else 0.0)


def _own_data(knowledge: Knowledge) -> Batch:
    if knowledge.public_data is None:
        raise MissingKnowledge("the curious client", "public_data")
    return knowledge.public_data


def _own_update(observation: Observation, round: Round) -> Update:
    """What the client's own training on its own data, once more, moved the model by.

    Without local epochs clients send gradients, and a defense meets these: clipping one is not clipping the step.
    """
    knowledge, model, data = observation.knowledge, observation.model, _own_data(observation.knowledge)
    if model is None or knowledge.loss is None or knowledge.local_lr is None:
        field = "model" if model is None else "loss" if knowledge.loss is None else "local_lr"
        raise MissingKnowledge("the curious client", field)
    gradient = knowledge.local_epochs is None
    like = next(iter(round.params.values()))
    update = local_update(
        model,
        {name: round.params[name] for name, _ in model.named_parameters()},
        Batch(data.tensor.to(like), data.labels.to(like.device)),
        loss=losses.resolve(knowledge.loss),
        protocol=FedSGD() if gradient else known_training(knowledge, "the curious client", steps=_own_steps(knowledge)),
        rng=torch.Generator(),
        defense=knowledge.defense.deterministic() if knowledge.defense is not None else None,
        buffers=buffers_of(observation, round),
        trained=tuple(round.update),
    ).update
    return as_delta(update, knowledge.local_lr) if gradient else update


def _own_steps(knowledge: Knowledge) -> int:
    samples = len(_own_data(knowledge))
    return (knowledge.local_epochs or 1) * math.ceil(samples / (knowledge.local_batch_size or samples))


def _repeatable(observation: Observation) -> bool:
    """Whether the client's own training comes out the same each time, as far as it can be known."""
    knowledge = observation.knowledge
    in_order = (knowledge.local_batch_size or len(_own_data(knowledge))) >= len(_own_data(knowledge))
    defense = knowledge.defense
    return in_order and (defense is None or defense.deterministic() == defense)


def _about_others(knowledge: Knowledge, number: int, own_samples: int) -> Knowledge:
    """What is known about the samples of the others in a round; the client's own, `own` of them, come first."""
    size = knowledge.batch_size[number] if isinstance(knowledge.batch_size, tuple) else knowledge.batch_size
    labels: Any = knowledge.labels
    if isinstance(labels, tuple):  # one entry a client: of which of them in a round is not said
        labels = labels[1] if len(labels) == 2 else None
    elif isinstance(labels, Tensor):
        labels = labels[own_samples:]
    return replace(
        knowledge,
        batch_size=None if size is None else size - own_samples,
        labels=labels,
        examples=None,
        participation=None,
    )
