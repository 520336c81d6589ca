"""What is tried where every attack that was chosen automatically refused: what their own sentences recommend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fedprism.attacks import ATTACKS
from fedprism.audit.choosing import other_inputs, pointless, probe_of
from fedprism.audit.entries import AttackEntry
from fedprism.audit.grid import AttackCell, Cell, situation_key
from fedprism.audit.materials import Setup
from fedprism.experiments import Outcome

RECOMMENDED = re.compile(r"[;.] [uU]se ([a-z-]+) ")
"""How a refusal names another attack."""


STANDS_FOR = {"gradient-matching": "inverting-gradients"}
"""The preset of a general method that is tried for it."""


def fallbacks(setup: Setup, cells: Iterable[Cell], outcome_of: Callable[[Cell], Outcome]) -> tuple[Cell, ...]:
    """Further cells, for settings in which no attack applied. None if the plan names attacks or captures."""
    if setup.plan.grid.attacks is not None or setup.plan.captures is not None:
        return ()
    situations: dict[str, list[AttackCell]] = {}
    for cell in cells:
        if isinstance(cell, AttackCell):
            situations.setdefault(f"{situation_key(cell.description)} {cell.seed}", []).append(cell)
    probe = probe_of(setup.materials())
    further: dict[str, Cell] = {}
    for members in situations.values():
        outcomes = [(cell, outcome_of(cell)) for cell in members]
        if any(outcome.state != "skipped" for _, outcome in outcomes):
            continue
        for cell, outcome in outcomes:
            for entry in _recommended(outcome.reason):
                method, threat = entry.method, cell.threat.method
                if other_inputs(method, probe.knowledge) is None and (
                    pointless(method, entry.label, threat, cell.clients, cell.defense) is None
                ):
                    tried = replace(cell, attack=entry)
                    further[tried.key] = tried
    known = {cell.key for members in situations.values() for cell in members}
    return tuple(cell for key, cell in further.items() if key not in known)


def _recommended(reason: str) -> Iterator[AttackEntry]:
    for name in RECOMMENDED.findall(reason):
        if name in ATTACKS:
            yield AttackEntry(name=STANDS_FOR.get(name, name))
