"""What a threat model sees of a federation's rounds, and everything it could be told about them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprism import losses
from fedprism.batchnorm import batchnorm_layers, exact_statistics, running_statistics
from fedprism.client import FedAvg
from fedprism.defenses.base import Chain, Defense
from fedprism.errors import BadInput
from fedprism.federation import Answer, Draw, aggregate, name_of, part_size, trained_names
from fedprism.randomness import generator, seeded_layers
from fedprism.scenario import Scenario
from fedprism.threats import ThreatModel
from fedprism.types import Knowledge, Round, Update


@dataclass(frozen=True)
class View:
    """How a threat model looks at a scenario in which these clients took part, (rounds, clients) bool."""

    scenario: Scenario
    threat: ThreatModel
    participation: Tensor

    @property
    def one_by_one(self) -> bool:
        """Whether it sees each client's update, not an aggregate."""
        return self.threat.sees == "client"

    @property
    def knows_cohorts(self) -> bool:
        """Whether it knows how many clients are behind an aggregate."""
        told = not self.threat.grants.isdisjoint({"cohort_sizes", "participation"})
        return told or bool(self.participation.all())

    def of_round(self, sent: Round, answers: Sequence[Answer], after: Update) -> list[Round]:
        """The round as it is seen: client by client, the aggregate, or the movement of the global model."""
        kind, reduction = self.scenario.protocol.kind, self.scenario.aggregation
        if self.one_by_one:
            return [
                replace(sent, update=answer.update, kind=kind, participants=(name_of(answer.draw.client),))
                for answer in answers
            ]
        clients = len(answers) if self.knows_cohorts else len(self.scenario.clients)
        trained = trained_names(self.scenario.model)
        if self.threat.participates:
            delta = {name: after[name] - sent.params[name] for name in trained}
            return [replace(sent, update=delta, kind="delta", clients=clients)]
        named = "participation" in self.threat.grants
        sized = named and "examples" in self.threat.grants  # sizes alone may tell who took part
        return [
            replace(
                sent,
                update=aggregate(answers, reduction)
                if answers
                else {name: torch.zeros_like(sent.params[name]) for name in trained},
                kind=kind,
                reduction=reduction,
                clients=clients,
                participants=tuple(name_of(answer.draw.client) for answer in answers) if named else None,
                examples=tuple(len(answer.draw.samples) for answer in answers) if sized else None,
            )
        ]

    def knowledge(self, rounds: Sequence[Round], drawn: Sequence[Draw]) -> Knowledge:
        """What the threat model grants of all there is to know."""
        scenario, protocol = self.scenario, self.scenario.protocol
        local = protocol if isinstance(protocol, FedAvg) else FedAvg(lr=protocol.lr)
        # A defense may change the loss; who knows the loss knows the one that clients train with.
        trained_with = scenario.defense.on_loss(losses.resolve(scenario.loss))
        windows = _windows(scenario.rounds, scenario.window) if scenario.window is not None else None
        everything = Knowledge(
            input_shape=tuple(scenario.clients[0].inputs.shape[1:]),
            bounds=scenario.bounds,
            normalization=scenario.normalization,
            batch_size=self._batch_size(drawn),
            examples=_examples(scenario, drawn),
            labels=self._labels(rounds, drawn),
            loss=losses.name_of(trained_with) or trained_with,
            local_lr=local.lr,
            local_epochs=local.epochs,
            local_batch_size=local.batch_size or max(len(draw.samples) for draw in drawn),
            local_momentum=local.momentum,
            batchnorm_exact=self._batchnorm_exact(rounds, drawn),
            batchnorm_running=running_statistics(scenario.model, rounds[0].buffers_before or {}),
            public_data=scenario.clients[0] if self.threat.participates else scenario.public_data,
            windows=windows,
            counts=(windows.long() @ self.participation.long()).T.contiguous() if windows is not None else None,
            participation=self.participation,
            cohort_sizes=self.participation.sum(1),
            defense=scenario.defense,
        )
        return everything.restricted_to(self.threat.grants)

    def _batch_size(self, drawn: Sequence[Draw]) -> int | tuple[int, ...] | None:
        """How many samples are behind each update: behind an aggregate, the union of the cohort's batches."""
        if self.one_by_one:
            sizes = [len(draw.samples) for draw in drawn]
            return tuple(sizes) if len(sizes) > 1 else sizes[0]
        if not self.knows_cohorts:
            return None  # it would tell how many took part
        totals = [0] * self.scenario.rounds
        for draw in drawn:
            totals[draw.round] += len(draw.samples)
        return totals[0] if len(set(totals)) == 1 else tuple(totals)

    def _batchnorm_exact(self, rounds: Sequence[Round], drawn: Sequence[Draw]) -> Update | None:
        """The statistics of what the batch-norm layers of the one client are fed, with the parameters it was sent.

        Of all the samples of its round: for FedSGD that is the forward pass behind the gradient.
        """
        scenario = self.scenario
        if "batchnorm_exact" not in self.threat.grants:
            return None  # a forward pass for nothing
        if not batchnorm_layers(scenario.model):
            return {}
        if len(drawn) != 1:
            raise BadInput(
                f"expected one client's one update to grant batchnorm_exact, found {len(drawn)} updates; "
                "simulate the clients one by one, or grant batchnorm_running."
            )
        if changing := [part for part in _parts(scenario.defense) if type(part).on_batch is not Defense.on_batch]:
            raise BadInput(
                f"expected a defense that feeds the network the client's own batch to grant batchnorm_exact, found "
                f"{changing[0]!r}; give the client the batch that it makes, or grant batchnorm_running."
            )
        model = copy.deepcopy(scenario.model).cpu().train(scenario.training)
        inputs = scenario.clients[drawn[0].client].inputs[drawn[0].samples].cpu()
        sent = rounds[0]
        with torch.no_grad(), seeded_layers(generator(0, "batchnorm_exact")):
            return exact_statistics(model, sent.params, sent.buffers_before or {}, inputs)

    def _labels(self, rounds: Sequence[Round], drawn: Sequence[Draw]) -> Tensor | tuple[Tensor, ...]:
        """Of the one update, of each client's update, or of each client where several aggregates are seen."""
        clients = self.scenario.clients
        if len(rounds) > 1 and any(seen.clients != 1 for seen in rounds):
            trained_on = samples_by_client(self.scenario, drawn)
            # Whoever never took part has labels all the same.
            return tuple(
                data.labels[used] if len(used) else data.labels for data, used in zip(clients, trained_on, strict=True)
            )
        each = tuple(clients[draw.client].labels[draw.samples] for draw in drawn)
        return each if len(rounds) > 1 else torch.cat(each)


def samples_by_client(scenario: Scenario, drawn: Sequence[Draw]) -> list[Tensor]:
    """For each client the samples that it trained on in any round, in the order of its data."""
    used = [torch.zeros(len(data), dtype=torch.bool) for data in scenario.clients]
    for draw in drawn:
        used[draw.client][draw.samples] = True
    return [mask.nonzero().flatten() for mask in used]


def _parts(defense: Defense) -> tuple[Defense, ...]:
    return defense.defenses if isinstance(defense, Chain) else (defense,)


def _examples(scenario: Scenario, drawn: Sequence[Draw]) -> tuple[int, ...]:
    """How many samples each client trains on in a round: those of its first, or of any had it taken part."""
    first = {draw.client: len(draw.samples) for draw in reversed(drawn)}
    return tuple(first.get(client, part_size(scenario, client)) for client in range(len(scenario.clients)))


def _windows(rounds: int, length: int) -> Tensor:
    """Which rounds each window holds, (windows, rounds) bool: one after the other, the last one may be short."""
    window_of = torch.arange(rounds) // length
    return window_of == torch.arange(int(window_of[-1]) + 1).unsqueeze(1)
