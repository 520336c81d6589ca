"""From a scenario to what an attacker sees and, on the other side of the wall, the truth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol as Interface

import torch
from torch import Tensor, nn

from fedprism.defenses.base import Context, Defense
from fedprism.errors import BadInput
from fedprism.inputs import joined, map_tensors
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism.simulation.drift import Drift
from fedprism.simulation.recorder import buffers_after, check_mixes_once
from fedprism.simulation.rounds import Answer, Draw, answers, name_of, participation, step
from fedprism.simulation.scenario import Scenario, check_fits
from fedprism.simulation.view import View, mean_buffers
from fedprism.threats import ThreatModel
from fedprism.truth import Truth
from fedprism.types import Observation, Round, Update, detached

__all__ = ["Scenario", "Tamperer", "simulate"]


class Tamperer(Interface):
    """A malicious server's method: it chooses the parameters and keeps a trapdoor to read the answer with."""

    def tamper(
        self, model: nn.Module, params: Update, rng: torch.Generator
    ) -> tuple[Update, dict[str, Tensor] | None]: ...


def simulate(
    scenario: Scenario,
    threat: ThreatModel,
    *,
    seed: int = 0,
    server: Tamperer | None = None,
    device: str | torch.device | None = None,
) -> tuple[Observation, Truth]:
    """Run the federation; return what `threat` sees and knows, and the truth, both on the CPU.

    `server` chooses the parameters when the threat model tampers. The scenario's model is left as it was. Clients train
    on `device`, or the best one there is. Under a defense that lets only sums through, a threat model that would see
    clients one by one sees the aggregate.
    """
    if server is not None and not threat.tampers:
        raise BadInput(
            f"a server method needs a threat model that tampers, not {threat.name}. Use threats.malicious_server."
        )
    if scenario.defense.sums_only:
        threat = replace(threat, sees="aggregate")
    view = View(scenario, threat, participation(scenario, seed))
    # A participant is the first client, and does not attack itself.
    if threat.participates and not bool(view.participation[:, 1:].any()):
        raise BadInput(f"{threat.name} needs a second client to attack. Add clients.")
    model = _untrained(scenario)
    params: Update = detached(dict(model.named_parameters()))
    trapdoor = None
    if server is not None:
        params, trapdoor = server.tamper(model, params, generator(seed, "tamper"))
    if not threat.grants.isdisjoint({"mixing", "mapping"}):
        check_mixes_once(scenario.defense)
    rounds, drawn, contributions = _trained(view, model, params, devices.pick(device), seed)
    observation = Observation(
        model=model if "model" in threat.grants else None,
        rounds=tuple(rounds),
        knowledge=view.knowledge(rounds, drawn, seed),
        trapdoor=trapdoor if "trapdoor" in threat.grants else None,
        subject=name_of(0) if view.one_by_one and len(scenario.clients) == 1 else None,
        source=f"simulated for {threat.name}, seed {seed}",
    )
    return observation, _truth(view, drawn, contributions)


def _untrained(scenario: Scenario) -> nn.Module:
    """A copy of the model, on the CPU, that fits the clients' data."""
    model = copy.deepcopy(scenario.model).cpu().train(scenario.training)
    model.zero_grad(set_to_none=True)  # a gradient left over from the user's own training is not for attackers
    for number, data in enumerate(scenario.clients):
        check_fits(model, data, number, scenario.loss)
    return model


def _trained(
    view: View, model: nn.Module, params: Update, place: torch.device, seed: int
) -> tuple[list[Round], list[Draw], _Contributions]:
    """All rounds, beginning with `params`: what is seen of them, who trained on what, and what each client sent."""
    scenario, recorded = view.scenario, view.recorded()
    buffers: Update = detached(dict(model.named_buffers()))
    trainer = copy.deepcopy(model).to(place) if place.type != "cpu" else model
    cohorts = [(index, row.nonzero().flatten().tolist()) for index, row in enumerate(view.participation)]
    to_one_model = answers(recorded, trainer, params, buffers, cohorts, seed) if scenario.frozen else None
    drift = Drift(scenario.drift, seed) if scenario.drift is not None else None
    rounds, drawn, contributions = list[Round](), list[Draw](), _Contributions(scenario, view)
    for index, cohort in cohorts:
        answering = to_one_model or answers(recorded, trainer, params, buffers, [(index, cohort)], seed)
        context = Context(model=model, params=params, round=index)
        answered = list(islice(answering, len(cohort)))
        answered = answered if drift is None else drift.drifted(answered)
        given = _defended_together(answered, scenario.defense, context, seed)
        after, left = step(params, given, scenario), list[Update]()
        if scenario.sends_buffers and buffers:
            left = [buffers_after(model, buffers, view.steps(answer.draw)) for answer in given]
        sent = Round(index=index, params=params, update={}, buffers_before=buffers or None)
        rounds.extend(view.of_round(sent, given, after, left))
        drawn.extend(answer.draw for answer in given)
        contributions.add(given)
        params = after
        if left and not scenario.frozen:
            buffers = mean_buffers(given, left, scenario.aggregation)
    return rounds, drawn, contributions


def _defended_together(given: list[Answer], defense: Defense, context: Context, seed: int) -> list[Answer]:
    """The answers of a round after the stage at which a defense meets all of them."""
    if not given:
        return []
    rng = generator(seed, "aggregate", context.round)
    updates = defense.on_aggregate([answer.update for answer in given], context, rng)
    return [answer._replace(update=update) for answer, update in zip(given, updates, strict=True)]


class _Contributions:
    """The mean of each client's updates, where that is what aggregates can be taken apart into."""

    def __init__(self, scenario: Scenario, view: View) -> None:
        self.kept = not view.one_by_one and (scenario.frozen or scenario.rounds == 1)
        self._totals: list[Update | None] = [None] * len(scenario.clients)
        self._counts = [0] * len(scenario.clients)
        self._dtypes = {name: parameter.dtype for name, parameter in scenario.model.named_parameters()}

    def add(self, given: Sequence[Answer]) -> None:
        for (client, _, _), update in given if self.kept else ():
            total = self._totals[client]
            # In double precision: the mean of updates that are all the same is that update.
            self._totals[client] = (
                update if total is None else {name: total[name].double() + tensor for name, tensor in update.items()}
            )
            self._counts[client] += 1

    def means(self) -> tuple[Update | None, ...] | None:
        """One a client, None for whoever never took part."""
        if not self.kept:
            return None
        return tuple(
            {name: (tensor / count).to(self._dtypes[name]) for name, tensor in total.items()} if total else None
            for total, count in zip(self._totals, self._counts, strict=True)
        )


def _truth(view: View, drawn: Sequence[Draw], contributions: _Contributions) -> Truth:
    scenario = view.scenario
    behind = [(draw.client, draw.samples) for draw in drawn]
    if scenario.frozen or not view.one_by_one or view.tells_mixing:  # each sample once, not once a round
        behind = list(enumerate(view.samples(drawn)))
    attacked = [(client, samples) for client, samples in behind if view.attacks(client)]
    batches = [scenario.clients[client][samples] for client, samples in attacked]
    return Truth(
        inputs=map_tensors(lambda tensor: tensor.detach().clone(), joined(batch.inputs for batch in batches)),
        labels=torch.cat([batch.labels for batch in batches]).detach().clone(),
        owners=tuple(name_of(client) for client, samples in attacked for _ in range(len(samples))),
        bounds=scenario.bounds,
        normalization=scenario.normalization,
        participation=view.participation,
        updates=contributions.means(),
    )
