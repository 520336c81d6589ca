"""What a threat model sees of a federation's rounds, and everything it could be told about them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from fedprism import losses
from fedprism.client.batchnorm import exact_statistics, running_statistics
from fedprism.client.update import FedAvg
from fedprism.defenses.counts import CountRelease
from fedprism.errors import BadInput
from fedprism.inputs import are_floating, shape_of, types_of
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.randomness import generator, seeded_layers
from fedprism.simulation.recorder import RecordingDefense, Step, mixes, step_statistics
from fedprism.simulation.rounds import Answer, Draw, aggregate, name_of, part_size, trained_names
from fedprism.simulation.scenario import Scenario
from fedprism.threats import ThreatModel
from fedprism.types import Knowledge, Reduction, Round, Update


@dataclass(frozen=True)
class View:
    """How a threat model looks at a scenario in which these clients took part, (rounds, clients) bool."""

    scenario: Scenario
    threat: ThreatModel
    participation: Tensor

    @cached_property
    def recorder(self) -> RecordingDefense:
        """The defense, which also records what it hands to the networks."""
        scenario = self.scenario
        sizes = {name_of(client): part_size(scenario, client) for client in range(len(scenario.clients))}
        return RecordingDefense((scenario.defense,), sizes if self._mixes_with_all else {}, keeps=self.looks_inside)

    def recorded(self) -> Scenario:
        """The scenario that is simulated: with the recorder where it is needed, which then draws the samples."""
        if not self.looks_inside and not self._mixes_with_all:
            return self.scenario
        fraction = 1.0 if self._mixes_with_all else self.scenario.fraction
        return replace(self.scenario, defense=self.recorder, fraction=fraction)

    def attacks(self, client: int) -> bool:
        """Whether a client is attacked: a participant, who is the first client, does not attack itself."""
        return not (self.threat.participates and client == 0)

    @property
    def _mixes_with_all(self) -> bool:
        """Whether clients mix the part of their data that they train on with all of it."""
        return self.scenario.fraction < 1 and mixes(self.scenario.defense) is not None

    @property
    def one_by_one(self) -> bool:
        """Whether it sees each client's update, not an aggregate."""
        return self.threat.sees == "client"

    @property
    def knows_cohorts(self) -> bool:
        """Whether it knows how many clients are behind an aggregate."""
        granted = not self.threat.grants.isdisjoint({"cohort_sizes", "participation"})
        return granted or bool(self.participation.all())

    @property
    def tells_mixing(self) -> bool:
        """Whether it is told which samples a defense mixed."""
        granted = not self.threat.grants.isdisjoint({"mixing", "mapping"})
        return granted and mixes(self.scenario.defense) is not None

    @property
    def looks_inside(self) -> bool:
        """Whether anything it is told, or what clients send, takes a look at what their networks were fed."""
        soft = "labels" in self.threat.grants and mixes(self.scenario.defense) is not None
        return soft or self.tells_mixing or "batchnorm_exact" in self.threat.grants or self.scenario.sends_buffers

    def steps(self, draw: Draw) -> list[Step]:
        """The local steps of a client in a round."""
        return self.recorder.steps[name_of(draw.client), draw.round]

    def of_round(self, sent: Round, answers: Sequence[Answer], after: Update, left: Sequence[Update]) -> list[Round]:
        """The round client by client, as an aggregate, or as the global model's movement; `left`: buffers sent back."""
        if self.one_by_one:
            return [
                replace(
                    sent,
                    update=answer.update,
                    kind=self.scenario.protocol.kind,
                    participants=(name_of(answer.draw.client),),
                    buffers_after=buffers,
                )
                for answer, buffers in zip_longest(answers, left)
            ]
        if left:
            sent = replace(sent, buffers_after=mean_buffers(answers, left, self.scenario.aggregation))
        sent = replace(sent, clients=len(answers) if self.knows_cohorts else len(self.scenario.clients))
        return [self._movement(sent, after) if self.threat.participates else self._aggregate(sent, answers)]

    def _movement(self, sent: Round, after: Update) -> Round:
        """What a participant sees: how the global model moved."""
        update = {name: after[name] - sent.params[name] for name in trained_names(self.scenario.model)}
        weighted = self.scenario.aggregation == "weighted_mean"
        return replace(sent, update=update, kind="delta", reduction="weighted_mean" if weighted else "mean")

    def _aggregate(self, sent: Round, answers: Sequence[Answer]) -> Round:
        reduction = self.scenario.aggregation
        nothing = {name: torch.zeros_like(sent.params[name]) for name in trained_names(self.scenario.model)}
        named = "participation" in self.threat.grants
        sized = named and "examples" in self.threat.grants  # sizes alone may tell who took part
        return replace(
            sent,
            update=aggregate(answers, reduction) if answers else nothing,
            kind=self.scenario.protocol.kind,
            reduction=reduction,
            participants=tuple(name_of(answer.draw.client) for answer in answers) if named else None,
            examples=tuple(len(answer.draw.samples) for answer in answers) if sized else None,
        )

    def knowledge(self, rounds: Sequence[Round], drawn: Sequence[Draw], seed: int) -> Knowledge:
        """What the threat model grants of all there is to know."""
        scenario, protocol = self.scenario, self.scenario.protocol
        local = protocol if isinstance(protocol, FedAvg) else FedAvg(lr=protocol.lr)
        # A participant sees steps of the global model only, but knows whether it sends gradients: without local epochs.
        sends_gradients = self.threat.participates and local is not protocol
        # A defense may change the loss; who knows the loss knows the one that clients train with.
        trained_with = scenario.defense.on_loss(losses.resolve(scenario.loss))
        windows = _windows(scenario.rounds, scenario.window) if scenario.window is not None else None
        inputs = scenario.clients[0].inputs
        everything = Knowledge(
            input_shape=shape_of(inputs),
            input_types=types_of(inputs) if not are_floating(types_of(inputs)) else None,
            bounds=scenario.bounds,
            normalization=scenario.normalization,
            batch_size=self._batch_size(drawn),
            examples=_examples(scenario, drawn),
            labels=self._labels(rounds, drawn),
            loss=losses.name_of(trained_with) or trained_with,
            local_lr=local.lr,
            local_epochs=local.epochs if not sends_gradients else None,
            local_batch_size=local.batch_size or max(len(draw.samples) for draw in drawn),
            local_momentum=local.momentum,
            local_optimizer=local.optimizer,
            batchnorm_exact=self._batchnorm_exact(rounds, drawn),
            batchnorm_running=running_statistics(scenario.model, rounds[0].buffers_before or {}),
            public_data=scenario.clients[0] if self.threat.participates else scenario.public_data,
            windows=windows,
            counts=self._counts(windows, seed) if windows is not None else None,
            count_release=scenario.counts if windows is not None and not scenario.counts.exact else None,
            participation=self.participation,
            cohort_sizes=self.participation.sum(1),
            mixing=self._mixing(drawn),
            defense=scenario.defense,
        )
        also = {"mixing"} if "mapping" in self.threat.grants else frozenset[str]()
        return everything.restricted_to(self.threat.grants | also)

    def _counts(self, windows: Tensor, seed: int) -> Tensor:
        """What devices report of how often each client took part, (clients, windows)."""
        counts = (windows.long() @ self.participation.long()).T.contiguous()
        release = self.scenario.counts
        if type(release) is CountRelease:
            return counts
        return release.release(counts, windows.sum(1), generator(seed, "counts"))

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

    def _batchnorm_exact(self, rounds: Sequence[Round], drawn: Sequence[Draw]) -> Update | tuple[Update, ...] | None:
        """The statistics of what the batch-norm layers of each client were fed, one entry an update."""
        scenario = self.scenario
        if "batchnorm_exact" not in self.threat.grants:
            return None  # forward passes for nothing
        if not batchnorm_layers(scenario.model):
            return {}
        if not self.one_by_one and len(drawn) > 1:
            raise BadInput(
                f"aggregates of {len(drawn)} updates have no statistics of one batch to grant as "
                "batchnorm_exact. See clients one by one, or grant batchnorm_running."
            )
        each = tuple(self._statistics(round, draw) for round, draw in zip(rounds, drawn, strict=True))
        return each if len(each) > 1 else each[0]

    def _statistics(self, sent: Round, draw: Draw) -> Update:
        """Of the one local step, what the network was fed; of several, all the samples with the parameters sent."""
        scenario, steps = self.scenario, self.steps(draw)
        model = copy.deepcopy(scenario.model).cpu().train(scenario.training)
        if len(steps) == 1:
            return step_statistics(model, sent.buffers_before or {}, steps[0])
        changing = [part for part in scenario.defense.members if part.overrides("on_batch")]
        if changing:
            raise BadInput(
                f"{len(steps)} steps with {changing[0]} have statistics of their own each, so batchnorm_exact "
                "cannot be granted. Let clients take one step, or grant batchnorm_running."
            )
        inputs = scenario.clients[draw.client][draw.samples].to(torch.device("cpu")).inputs
        with torch.no_grad(), seeded_layers(generator(0, "batchnorm_exact")):
            return exact_statistics(model, sent.params, sent.buffers_before or {}, inputs)

    def _labels(self, rounds: Sequence[Round], drawn: Sequence[Draw]) -> Tensor | tuple[Tensor, ...]:
        """Of the one update, of each client's update, or of each client where several aggregates are seen."""
        clients = self.scenario.clients
        if len(rounds) > 1 and any(round.clients != 1 for round in rounds):
            trained_on = samples_by_client(self.scenario, drawn)
            # Whoever never took part has labels all the same.
            return tuple(
                data.labels[used] if len(used) else data.labels for data, used in zip(clients, trained_on, strict=True)
            )
        each = tuple(self._fed_labels(draw) for draw in drawn)
        return each if len(rounds) > 1 else torch.cat(each)

    def samples(self, drawn: Sequence[Draw]) -> list[Tensor]:
        """For each client the samples that are behind any update: those it trained on and, if told, what was mixed."""
        behind = list(drawn)
        if self.tells_mixing and self._mixes_with_all:
            behind += [
                draw._replace(samples=step.mixing.partners.flatten())
                for draw in drawn
                for step in self.steps(draw)
                if step.mixing is not None
            ]
        return samples_by_client(self.scenario, behind)

    def _fed_labels(self, draw: Draw) -> Tensor:
        """The labels behind an update: those of the mixtures where samples are mixed, each once."""
        labels = self.scenario.clients[draw.client].labels[draw.samples]
        if "labels" not in self.threat.grants or mixes(self.scenario.defense) is None:
            return labels
        fed = torch.cat([step.fed.labels.cpu() for step in self.steps(draw)])
        return fed if len(fed) == len(labels) else labels

    def _mixing(self, drawn: Sequence[Draw]) -> Update | None:
        """What was mixed in every step of every attacked client, samples numbered as the truth lists them."""
        if not self.tells_mixing:
            return None
        rows, mixing = self._rows_in_truth(drawn), dict[str, list[Tensor]](mapping=[], coefficients=[], updates=[])
        for place, draw in enumerate(drawn):
            for step in self.steps(draw) if self.attacks(draw.client) else ():
                assert step.mixing is not None
                partners = step.mixing.partners
                samples = partners if self._mixes_with_all else draw.samples[partners]
                mixing["mapping"].append(rows[draw.client][samples])
                mixing["coefficients"].append(step.mixing.coefficients)
                mixing["updates"].append(torch.full((len(partners),), place if self.one_by_one else draw.round))
        if "mixing" not in self.threat.grants:
            del mixing["coefficients"]
        return {name: torch.cat(tensors) for name, tensors in mixing.items()}

    def _rows_in_truth(self, drawn: Sequence[Draw]) -> list[Tensor]:
        """For each client the row in the truth of each of its samples, -1 where it has none."""
        rows, count = list[Tensor](), 0
        for client, used in enumerate(self.samples(drawn)):
            rows.append(torch.full((len(self.scenario.clients[client]),), -1))
            if self.attacks(client):
                rows[client][used] = torch.arange(count, count + len(used))
                count += len(used)
        return rows


def samples_by_client(scenario: Scenario, drawn: Sequence[Draw]) -> list[Tensor]:
    """For each client the samples that it trained on in any round, in the order of its data."""
    used = [torch.zeros(len(data), dtype=torch.bool) for data in scenario.clients]
    for draw in drawn:
        used[draw.client][draw.samples] = True
    return [mask.nonzero().flatten() for mask in used]


def mean_buffers(answers: Sequence[Answer], left: Sequence[Update], reduction: Reduction) -> Update:
    """The server's mean of the clients' buffers, weighted as their updates are; counters are rounded."""
    sizes = [len(answer.draw.samples) if reduction == "weighted_mean" else 1 for answer in answers]
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    means = {
        name: torch.einsum("c,c...->...", weights, torch.stack([buffers[name].double() for buffers in left]))
        for name in left[0]
    }
    return {
        name: (mean if left[0][name].dtype.is_floating_point else mean.round()).to(left[0][name].dtype)
        for name, mean in means.items()
    }


def _examples(scenario: Scenario, drawn: Sequence[Draw]) -> tuple[int, ...]:
    """How many samples each client trains on in a round: those of its first, or of any had it taken part."""
    first = {draw.client: len(draw.samples) for draw in reversed(drawn)}
    return tuple(first.get(client, part_size(scenario, client)) for client in range(len(scenario.clients)))


def _windows(rounds: int, length: int) -> Tensor:
    """Which rounds each window holds, (windows, rounds) bool: one after the other, the last one may be short."""
    window_of = torch.arange(rounds) // length
    return window_of == torch.arange(int(window_of[-1]) + 1).unsqueeze(1)
