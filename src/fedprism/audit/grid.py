"""The cells of a plan: every combination that makes sense, and a reason for each that does not.

What makes sense, and what is chosen where the plan does not say, is decided in `choosing`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from fedprism.audit.assumed import Assumed, assuming, described, shapes, told_lacking, tried
from fedprism.audit.choosing import (
    OTHERS,
    UNSEEN,
    Skipped,
    default_attacks,
    default_threats,
    lacking,
    pointless,
    probe_of,
    repeated,
    unnamed,
)
from fedprism.audit.chosen_updates import chosen_updates, number_of_updates, one_by_one, why_not_others
from fedprism.audit.entries import AttackEntry, DefenseEntry, ProtocolEntry, ThreatEntry, chains, made_chain
from fedprism.audit.entries import in_words as settings_in_words
from fedprism.audit.materials import Materials, Setup
from fedprism.audit.plan import Plan
from fedprism.errors import BadPlan
from fedprism.experiments.outcome import identity
from fedprism.inputs import values_in
from fedprism.naming import counted
from fedprism.simulation.scenario import check_fits
from fedprism.truth import is_kept
from fedprism.types import Observation

MOST_CELLS = 100_000
"""Cells of a plan: more than any audit that ends, and few enough to be listed."""
MOST_VALUES = 2**28
"""Values in what all clients of a cell hold together."""


OF_THE_ATTACK = ("kind", "attack", "settings", "seed")
"""What may differ between cells that share a ceiling, beside the ceiling's own cell."""


class _Cell:
    @cached_property
    def description(self) -> dict[str, Any]:
        """What the cell is, in words and numbers: its name in records. No path."""
        raise NotImplementedError

    @cached_property
    def key(self) -> str:
        """Depends on what the cell is, not on where in the grid it stands."""
        return identity(self.description)


@dataclass(frozen=True, kw_only=True)
class CeilingCell(_Cell):
    """What no attacker can exceed in one simulated federation: computed once for all attacks on it."""

    kind: ClassVar[str] = "ceiling"
    clients: int
    batch_size: int
    protocol: ProtocolEntry
    loss: str
    defense: tuple[DefenseEntry, ...]
    threat: ThreatEntry
    seed: int

    @cached_property
    def description(self) -> dict[str, Any]:
        return self._described()

    def _described(self, **attack: str) -> dict[str, Any]:
        return {
            "kind": self.kind,
            **attack,
            "threat": self.threat.method.name,
            "defense": in_words(self.defense),
            "defense_settings": repr(made_chain(self.defense)),
            "clients": self.clients,
            "batch_size": self.batch_size,
            "protocol": repr(self.protocol.method),
            "loss": self.loss,
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True)
class AttackCell(CeilingCell):
    """One attack on one simulated federation."""

    kind: ClassVar[str] = "attack"
    attack: AttackEntry

    @cached_property
    def description(self) -> dict[str, Any]:
        return self._described(attack=self.attack.label, settings=repr(self.attack.method))

    @property
    def ceiling(self) -> CeilingCell:
        """The cell that bounds every attack on the same federation."""
        return CeilingCell(**{field.name: getattr(self, field.name) for field in fields(CeilingCell)})


@dataclass(frozen=True, kw_only=True)
class CaptureCell(_Cell):
    """One attack on one capture. `number` is the capture's place in the plan."""

    kind: ClassVar[str] = "capture"
    number: int
    name: str
    attack: AttackEntry
    seed: int
    assumed: Assumed = ()
    """What the capture does not tell, and what was assumed in its place."""
    updates: tuple[int, ...] | None = None
    """The places of the updates that are attacked; all if it is None."""

    @cached_property
    def description(self) -> dict[str, Any]:
        part = "" if self.updates is None else f", {counted(len(self.updates), 'chosen update')}"
        return {
            "kind": self.kind,
            "capture": f"{self.number}: {self.name}{part}{described(self.assumed)}",
            "attack": self.attack.label,
            "settings": repr(self.attack.method),
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True)
class UtilityCell(_Cell):
    """What a defense costs: accuracy, time and epsilon. All seeds are one cell, because they are one training run."""

    kind: ClassVar[str] = "utility"
    defense: tuple[DefenseEntry, ...]
    loss: str

    @cached_property
    def description(self) -> dict[str, Any]:
        settings = repr(made_chain(self.defense))
        return {
            "kind": self.kind,
            "defense": in_words(self.defense),
            "defense_settings": settings,
            "loss": self.loss,
        }


Cell = AttackCell | CeilingCell | CaptureCell | UtilityCell


@dataclass(frozen=True, kw_only=True)
class Grid:
    cells: tuple[Cell, ...]
    skipped: tuple[Skipped, ...]


def in_words(defense: Sequence[DefenseEntry]) -> str:
    """As the plan says it: prune(ratio=0.9) + clip(norm=1.0)."""
    return " + ".join(f"{entry.name}({settings_in_words(entry.settings)})" for entry in defense) or "none"


def lay_out(setup: Setup, *, allow_empty: bool = False) -> Grid:
    """Every cell of the plan, in its order, and what was left out."""
    plan, materials = setup.plan, setup.materials()
    _check_size(plan)
    if plan.captures is not None:
        cells, skipped = _captures(setup)
    else:
        _check_data(plan, materials)
        _check_model(materials, plan.grid.losses)
        cells, skipped = _simulated(plan, materials)
    unique = tuple({cell.key: cell for cell in cells}.values())
    if not unique and not allow_empty:
        reasons = dict.fromkeys(each.why for each in skipped if each is not UNSEEN and each.why != OTHERS)
        raise BadPlan(
            f"the plan has nothing to run ({'; '.join(list(reasons)[:3])}). Add what is missing, or name "
            "other attacks or threats."
        )
    return Grid(cells=unique, skipped=tuple(dict.fromkeys(skipped)))


def _simulated(plan: Plan, materials: Materials) -> tuple[list[Cell], list[Skipped]]:
    grid, skipped = plan.grid, unnamed(plan)
    defenses = [chain for entries in grid.defenses for chain in chains(entries)]
    protocols = [each for entry in grid.protocols for each in entry.variants]
    probe = probe_of(materials)
    threats = grid.threats or default_threats(plan, probe, skipped)
    attackers = {entry: entry.method for entry in threats}
    if grid.attacks is None:
        attacks = default_attacks(probe, plan, list(attackers.values()), skipped)
    else:
        attacks = [each for entry in grid.attacks for each in entry.variants]
    cells: list[Cell] = []
    settings = itertools.product(grid.clients, grid.batch_sizes, protocols, grid.losses, defenses, threats, attacks)
    for clients, batch_size, protocol, loss, defense, threat, attack in settings:
        method, attacker = attack.method, attackers[threat]
        reason = pointless(method, attack.label, attacker, clients, defense)
        if reason is None and grid.threats is None:
            reason = repeated(method, attack.label, attacker, list(attackers.values()))
        if reason is not None:
            skipped.append(reason)
            continue
        cells += [
            AttackCell(
                clients=clients,
                batch_size=batch_size,
                protocol=protocol,
                loss=loss,
                defense=defense,
                threat=threat,
                attack=attack,
                seed=seed,
            )
            for seed in grid.seeds
        ]
    if plan.scores.ceiling:
        cells += [cell.ceiling for cell in cells if isinstance(cell, AttackCell)]
    if plan.utility is not None:
        cells += [UtilityCell(defense=defense, loss=loss) for defense in defenses for loss in grid.losses]
    return cells, skipped


def _captures(setup: Setup) -> tuple[list[Cell], list[Skipped]]:
    plan = setup.plan
    assert plan.captures is not None
    cells: list[Cell] = []
    skipped = [*unnamed(plan), UNSEEN]
    for number, folder in enumerate(plan.captures.folders, 1):
        told = setup.observation(folder)
        name = (setup.base / folder).resolve().name
        skipped += told_lacking(told, f"{number}: {name}")
        updates = _chosen(setup, told, number, f"{number}: {name}", skipped)
        for shape in shapes(told):
            observation = assuming(told, shape)
            if plan.grid.attacks is None:
                attacks = default_attacks(observation, plan, [], skipped)
            else:
                attacks = [each for entry in plan.grid.attacks for each in entry.variants]
            for attack in attacks:
                for values in tried(attack.method, observation):
                    why = lacking(attack.method, assuming(observation, values))
                    if why is not None:
                        skipped.append(Skipped(what=f"{attack.label} on {number}: {name}", why=why))
                        continue
                    assumed = (*shape, *values)
                    part = updates if one_by_one(attack.method) else None
                    cells += [
                        CaptureCell(number=number, name=name, attack=attack, seed=seed, assumed=assumed, updates=part)
                        for seed in plan.grid.seeds
                    ]
    return cells, skipped


def _chosen(
    setup: Setup, observation: Observation, number: int, capture: str, skipped: list[Skipped]
) -> tuple[int, ...] | None:
    """The places of the updates that are attacked one by one; None if these are all."""
    part = setup.plan.captures
    assert part is not None
    if part.truths and not is_kept(setup.base / part.truths[number - 1]):
        return None  # nothing tells which of its samples are behind which update
    chosen, updates = chosen_updates(observation, part.most_updates), number_of_updates(observation)
    if len(chosen) == updates:
        return None
    what = f"{updates - len(chosen)} of {updates} updates of capture {capture}"
    skipped.append(Skipped(what=what, why=why_not_others(chosen, updates)))
    return tuple(each.place for each in chosen)


def _check_size(plan: Plan) -> None:
    """Before anything is multiplied out."""
    grid = plan.grid
    attacks = sum(entry.combinations for entry in grid.attacks or ()) or 1
    if plan.captures is not None:
        count = len(plan.captures.folders) * attacks * len(grid.seeds)
    else:
        count = math.prod(
            [
                *map(len, (grid.clients, grid.batch_sizes, grid.losses, grid.seeds)),
                sum(entry.combinations for entry in grid.protocols),
                sum(math.prod(entry.combinations for entry in entries) for entries in grid.defenses),
                attacks,
                len(grid.threats or ()) or 1,
            ]
        )
    if count > MOST_CELLS:
        raise BadPlan(f"the plan has {count} runs; the limit is {MOST_CELLS}. Remove some values.")


def _check_data(plan: Plan, materials: Materials) -> None:
    assert materials.samples is not None
    assert plan.data is not None
    wanted = max(plan.grid.clients) * max(plan.grid.batch_sizes) + plan.data.public
    if wanted > len(materials.samples):
        raise BadPlan(
            f"{materials.samples.name} has {len(materials.samples)} samples; {wanted} are needed for "
            f"{max(plan.grid.clients)} clients with {max(plan.grid.batch_sizes)} each and "
            f"{plan.data.public} public ones. Lower grid.clients or grid.batch_sizes."
        )
    bounds = materials.other_bounds()
    if bounds is not None:
        raise BadPlan(
            f"{materials.samples.name} has values from {bounds[0]:g} to {bounds[1]:g}, outside "
            f"data.bounds {list(materials.bounds)}. Write bounds = {list(bounds)}, or state the "
            "normalization."
        )
    values = wanted * values_in(materials.batch(torch.tensor([0])).inputs)
    if values > MOST_VALUES:
        raise BadPlan(
            f"a run would hold {values} values of data; the limit is {MOST_VALUES}. Use smaller batches "
            "or fewer clients."
        )


def _check_model(materials: Materials, losses: Sequence[str]) -> None:
    """Two samples through the model and each loss, so that a misfit is told once and not by every cell."""
    assert materials.samples is not None
    labels = materials.samples.labels
    last = int(labels.argmax()) if labels.dim() == 1 else len(labels) - 1
    few = materials.batch(torch.tensor([last, (last + 1) % len(labels)]))
    for name in losses:
        check_fits(materials.network(0), few, 0, materials.loss(name))


def configurations(cells: Sequence[Cell]) -> Iterator[tuple[dict[str, Any], list[Cell]]]:
    """Cells that differ in nothing but the seed, together."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(configuration_key(cell.description), []).append(cell)
    for members in groups.values():
        yield without_seed(members[0].description), members


def without_seed(described: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key != "seed"}


def configuration_key(described: Mapping[str, Any]) -> str:
    return json.dumps(without_seed(described), sort_keys=True)


def situation_key(described: Mapping[str, Any]) -> str:
    """The same for all attacks in one setting: they share a ceiling."""
    return json.dumps({key: value for key, value in described.items() if key not in OF_THE_ATTACK}, sort_keys=True)
