"""The cells of a plan as trials: what an experiment needs to run one, made from the plan when it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprism import utility
from fedprism.audit.assumed import assuming
from fedprism.audit.entries import made_chain
from fedprism.audit.grid import AttackCell, CaptureCell, CeilingCell, Cell, UtilityCell
from fedprism.audit.materials import Materials, Setup
from fedprism.defenses import CountRelease, EqualLabels
from fedprism.errors import BadInput
from fedprism.evaluation.baselines import MOST_AVERAGED, guesses
from fedprism.evaluation.ceiling import ceiling
from fedprism.experiments import Outcome, Scoring, Setting, Trial
from fedprism.experiments.execution import Runnable
from fedprism.files import json_text
from fedprism.inputs import Inputs, map_tensors
from fedprism.pixels import to_inputs
from fedprism.randomness import generator
from fedprism.simulation.federation import simulate
from fedprism.simulation.scenario import Scenario
from fedprism.truth import load_truth
from fedprism.types import Batch, Record
from fedprism.utility import Utility

CEILING_KEPT = ("metric", "values", "confidence", "pairs", "prior", "linearised", "from_epsilon", "status")
"""What a record holds of a ceiling: not the pictures behind it."""
RATES = (0.05, 0.01, 0.2)
"""Learning rates that a search tries; of equally good ones the first is taken."""
PICTURES = 8
"""Samples a cell keeps with what came back, unless the plan says otherwise."""


def trial_of(setup: Setup, cell: Cell) -> Runnable:
    """What runs a cell."""
    if isinstance(cell, UtilityCell):
        return Training(setup=setup, cell=cell)
    if not isinstance(cell, AttackCell | CaptureCell):
        return Bounding(setup=setup, cell=cell)
    setting = partial(_simulated, setup, cell) if isinstance(cell, AttackCell) else partial(_captured, setup, cell)
    return Trial(
        key=cell.key,
        description=cell.description,
        setting=setting,
        attack=cell.attack.method,
        seed=cell.seed,
        scoring=partial(_scoring, setup, captured=isinstance(cell, CaptureCell)),
    )


def _scoring(setup: Setup, *, captured: bool) -> Scoring:
    wanted = setup.plan.scores
    # Nobody agreed to see what a capture holds: pictures are kept only if the plan says so.
    kept = wanted.pictures if wanted.pictures is not None else 0 if captured else PICTURES
    return Scoring(
        metrics=wanted.metrics,
        columns=setup.materials().columns,
        tolerance=wanted.tolerance,
        allow_download=setup.allow_download,
        kept=kept,
    )


def _scenario(setup: Setup, cell: CeilingCell) -> tuple[Scenario, Tensor]:
    """What is simulated, and the numbers of samples that nobody in it holds."""
    plan, materials = setup.plan, setup.materials()
    assert plan.data is not None
    assert plan.model is not None
    clients, public, others = _draw(materials, cell, plan.data.public)
    return Scenario(
        model=materials.network(cell.seed),
        clients=clients,
        protocol=cell.protocol.method,
        defense=made_chain(cell.defense),
        loss=materials.loss(cell.loss),
        rounds=plan.federation.rounds,
        aggregation=plan.federation.aggregation,
        training=plan.model.training,
        public_data=public,
        bounds=materials.bounds,
        normalization=materials.normalization,
        participation=plan.federation.participation,
        frozen=plan.federation.frozen,
        window=plan.federation.window,
        counts=plan.federation.counts.method if plan.federation.counts is not None else CountRelease(),
        drift=plan.federation.drift,
        fraction=plan.federation.fraction,
    ), others


def _simulated(setup: Setup, cell: AttackCell, device: str | None) -> Setting:
    materials = setup.materials()
    assert materials.samples is not None
    scenario, others = _scenario(setup, cell)
    attack, threat = cell.attack.method, cell.threat.method
    server: Any = attack if threat.tampers and hasattr(attack, "tamper") else None
    observation, truth = simulate(scenario, threat, seed=cell.seed, server=server, device=device)
    pool = materials.samples.batch(others[:MOST_AVERAGED]).inputs
    return Setting(observation=observation, truth=truth, guesses=partial(_guesses, materials, pool, cell.seed))


def _guesses(materials: Materials, pool: Inputs, seed: int, count: int) -> Mapping[str, Inputs]:
    answers = guesses(pool, materials.bounds, count, seed)
    if materials.normalization is None:
        return answers
    return {name: map_tensors(lambda t: to_inputs(t, materials.normalization), v) for name, v in answers.items()}


def _captured(setup: Setup, cell: CaptureCell, device: str | None) -> Setting:
    captures = setup.plan.captures
    assert captures is not None
    observation = assuming(setup.observation(captures.folders[cell.number - 1], cell.updates), cell.assumed)
    truth = load_truth(setup.base / captures.truths[cell.number - 1], observation) if captures.truths else None
    return Setting(observation=observation, truth=truth)


def _draw(materials: Materials, cell: CeilingCell, public: int) -> tuple[tuple[Batch, ...], Batch | None, Tensor]:
    """Who holds what, public samples, and the numbers of samples that nobody holds.

    The same for every defense, threat model and attack of a seed, so that they compare.
    """
    assert materials.samples is not None
    order = torch.randperm(len(materials.samples), generator=generator(cell.seed, "samples"))
    size, total = cell.batch_size, cell.clients * cell.batch_size
    if any(isinstance(entry.method, EqualLabels) for entry in cell.defense):
        order = _one_class_each(order, materials.samples.labels, cell.clients, size)
    clients = tuple(materials.batch(part) for part in torch.split(order[:total], size))
    others = order[total + public :]
    return (
        clients,
        materials.batch(order[total : total + public]) if public else None,
        others if len(others) else order,  # all samples are taken: then one of them has to do
    )


def _one_class_each(order: Tensor, labels: Tensor, clients: int, size: int) -> Tensor:
    """The samples in an order whose first batches, one per client, are of one class each."""
    if labels.dim() != 1 or labels.is_floating_point():
        raise BadInput("equal-labels needs class numbers as labels. Leave that defense out.")
    classes = labels[order]
    counts = torch.bincount(classes)
    batches = [
        order[classes == number][: counts[number] // size * size].view(-1, size)
        for number in torch.unique(classes).tolist()
        if counts[number] >= size
    ]
    turns = [batch[turn] for turn in range(max(map(len, batches), default=0)) for batch in batches if turn < len(batch)]
    if len(turns) < clients:
        raise BadInput(
            f"equal-labels needs {size} samples of one class for each of {clients} clients; only "
            f"{len(turns)} have that. Lower batch_sizes or clients, or give more data."
        )
    first = torch.cat(turns[:clients])
    return torch.cat([first, order[~torch.isin(order, first)]])


@dataclass(frozen=True, kw_only=True)
class _OfCell:
    """What runs a cell without an attack."""

    setup: Setup
    cell: Cell

    @property
    def key(self) -> str:
        return self.cell.key

    @property
    def description(self) -> Mapping[str, Any]:
        return self.cell.description


@dataclass(frozen=True, kw_only=True)
class Bounding(_OfCell):
    """A ceiling cell: what no attacker can exceed."""

    cell: CeilingCell

    def run(self, device: str | None) -> Outcome:
        scenario, _ = _scenario(self.setup, self.cell)
        bound = ceiling(scenario, self.cell.threat.method, seed=self.cell.seed, device=device)
        kept = {field: getattr(bound, field) for field in CEILING_KEPT}
        record = Record(
            kind="ceiling",
            run=self.description,
            ceiling=kept,
            status=bound.status,
            seed=self.cell.seed,
            versions=json_text.versions(),
        )
        return Outcome(key=self.key, description=self.description, state="done", record=record)


@dataclass(frozen=True, kw_only=True)
class Training(_OfCell):
    """A utility cell: what a defense costs."""

    cell: UtilityCell

    def run(self, device: str | None) -> Outcome:
        plan, materials = self.setup.plan, self.setup.materials()
        wanted = plan.utility
        assert wanted is not None
        assert materials.samples is not None
        order = torch.randperm(len(materials.samples), generator=generator(0, "held back"))
        held_back = max(1, round(wanted.test * len(order)))
        train, test = order[held_back:], order[:held_back]

        def trained(on: Tensor, scored_on: Tensor, lr: float, seeds: Sequence[int], timed_steps: int) -> Utility:
            return utility.measure(
                materials.new_network,
                materials.batch(on),
                materials.batch(scored_on),
                made_chain(self.cell.defense),
                epochs=wanted.epochs,
                batch_size=wanted.batch_size,
                clients=wanted.clients,
                lr=lr,
                seeds=seeds,
                device=device,
                loss=materials.loss(self.cell.loss),
                delta=wanted.delta,
                timed_steps=timed_steps,
            )

        if wanted.lr == "search":  # on training data that is held back once more: the test data choose nothing
            tuning = max(1, round(wanted.test * len(train)))
            fit, held = train[tuning:], train[:tuning]
            lr = max(RATES, key=lambda rate: trained(fit, held, rate, wanted.seeds[:1], 0).accuracy)
        else:
            lr = wanted.lr
        measured = trained(train, test, lr, wanted.seeds, wanted.timed_steps)
        status = "; ".join(filter(None, [measured.status, f"lr {lr:g}" if wanted.lr == "search" else ""]))
        record = dataclasses.replace(measured.record(self.cell.description), status=status)
        return Outcome(
            key=self.key,
            description=self.description,
            state="done",
            record=dataclasses.replace(record, time_factor=None),
            time_factor=record.time_factor,
        )
