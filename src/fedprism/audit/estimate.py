"""How long an audit will take and how much memory, measured on shortened cells instead of guessed."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from fedprism.attacks import Attack, Then
from fedprism.audit.chosen_updates import one_by_one
from fedprism.audit.grid import AttackCell, CaptureCell, Cell, Grid, UtilityCell
from fedprism.audit.materials import Setup
from fedprism.audit.trials import RATES, trial_of
from fedprism.experiments import run_trial
from fedprism.experiments.execution import Runnable
from fedprism.runtime import devices
from fedprism.runtime.executors import Failure, Processes

FEW = 2
"""Iterations of the shorter form of an attack."""
MORE = 22
"""Iterations of the longer form: what it takes longer is what so many more iterations take."""
MOST = 220
"""Iterations of a still longer form, where the longer one was over too soon to tell."""
TELLING = 3.0
"""Seconds that the longer form must take longer than the shorter one: less is mostly what else the machine does."""
PATIENCE = 45.0
"""Seconds that a cell's shortened forms may take, the process's start included; more is told as at least that."""
MOST_WAITED_FOR = 2
"""Cells that may take too long before no further ones are tried."""
MOST_PROBES = 12
"""Cells that are tried."""
CONTEXT = 700 * 2**20
"""Bytes that a process takes of a GPU's memory before it does anything."""
RESERVE = 1.2
"""By how much more than a shortened cell a whole one may take."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    seconds: float
    at_least: bool
    """Whether a shortened cell did not finish, so that it may take much longer."""
    memory: int
    """Bytes that one worker takes of the machine's memory."""
    gpu_memory: int
    refused: tuple[tuple[int, str], ...] = ()
    """How many cells cannot run and are not priced, and why."""

    def __str__(self) -> str:
        gpu = f" and {self.gpu_memory / 2**20:.0f} MB of the GPU's" if self.gpu_memory else ""
        memory = f"{self.memory / 2**20:.0f} MB of memory{gpu} per worker" if self.memory else "of unknown memory"
        return f"{'at least' if self.at_least else 'about'} {duration(self.seconds)} with one worker, {memory}"


class Price(NamedTuple):
    """What a cell costs, by shortened forms of it."""

    refused: str = ""
    """Why the cell cannot run."""
    seconds: float = PATIENCE
    memory: int = 0
    gpu_memory: int = 0


def estimate(setup: Setup, grid: Grid, device: str | None = None) -> Estimate:
    """Run the first cell of each kind in shortened form, in a process of its own, and scale up."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in grid.cells:
        alike = (cell.description.get(key) for key in ("kind", "settings", "batch_size", "clients", "protocol"))
        groups.setdefault(tuple(alike), []).append(cell)
    chosen = list(groups.values())[:MOST_PROBES]
    probes = _probes(setup, device, [members[0] for members in chosen])
    tried = [(probe or Price(), len(members)) for probe, members in zip(probes, chosen, strict=True)]
    refused = tuple((count, probe.refused) for probe, count in tried if probe.refused)
    measured = [probe for probe, _ in tried if not probe.refused] or [Price(seconds=0.0)]
    known = sum(probe.seconds * count for probe, count in tried if not probe.refused)
    others = len(grid.cells) - sum(map(len, chosen))
    return Estimate(
        seconds=known + others * math.fsum(probe.seconds for probe in measured) / len(measured),
        at_least=None in probes,
        memory=max(probe.memory for probe in measured),
        gpu_memory=max(probe.gpu_memory for probe in measured),
        refused=refused,
    )


def workers_that_fit(setup: Setup, grid: Grid, workers: int, device: torch.device) -> int:
    """How many workers the GPU has memory for, by the largest cell of each method; on the CPU as many as asked for.

    What a cell that took too long needs, nobody knows: then cells that run out of memory are tried again alone.
    """
    if device.type != "cuda" or workers == 1 or not grid.cells:
        return workers

    def samples(cell: Cell) -> int:
        return int(getattr(cell, "batch_size", 0) * getattr(cell, "clients", 1))

    largest = {(cell.kind, str(cell.description.get("settings"))): cell for cell in sorted(grid.cells, key=samples)}
    chosen = sorted(largest.values(), key=samples, reverse=True)[:MOST_PROBES]
    needed = max(probe.gpu_memory if probe else 0 for probe in _probes(setup, str(device), chosen))
    return fitting(workers, torch.cuda.mem_get_info(device)[0], needed)


def fitting(workers: int, free: int, needed: int) -> int:
    """How many workers that each need so many bytes of a GPU fit into what is free; at least one."""
    return max(1, min(workers, int(free // (RESERVE * needed + CONTEXT))))


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def prices(setup: Setup, cells: Sequence[Cell], device: str | None = None) -> list[Price | None]:
    """What each cell costs, or why it cannot run; None where that took too long to find out."""
    return list(_probes(setup, device, cells))


def _probes(setup: Setup, device: str | None, cells: Sequence[Cell]) -> list[Price | None]:
    probes: list[Price | None] = [None] * len(cells)
    missed = 0
    for index, outcome in Processes(workers=1, timeout=PATIENCE).run(partial(_probe, setup, device), cells):
        if not isinstance(outcome, Failure):
            probes[index] = outcome
        elif not outcome.too_long:
            probes[index] = Price(refused=outcome.reason)
        missed += isinstance(outcome, Failure) and outcome.too_long
        if missed == MOST_WAITED_FOR:
            break
    return probes


def _probe(setup: Setup, device: str | None, cell: Cell) -> Price:
    setup.materials()  # loaded once per worker, so not part of a cell's time
    place = devices.pick(device)
    if place.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before that there is no peak to forget
        torch.cuda.reset_peak_memory_stats(place)
    seconds, refused = _seconds(setup, device, cell)
    # What is reserved, not what is used of it: the rest is not there for others either.
    return Price(refused, seconds, _peak_memory(), torch.cuda.max_memory_reserved(place) if place.type == "cuda" else 0)


def _peak_memory() -> int:
    """The most that this process has had in memory, in bytes; 0 if the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _seconds(setup: Setup, device: str | None, cell: Cell) -> tuple[float, str]:
    """What a whole cell takes, told by two shortened ones, and why it cannot run; empty where it can.

    What a process does once only is over before they start.
    """
    if isinstance(cell, CaptureCell):
        cell, times = _with_one_update(setup, cell)
        seconds, refused = _seconds_of_one(setup, device, cell)
        return times * seconds, refused
    return _seconds_of_one(setup, device, cell)


def _with_one_update(setup: Setup, cell: CaptureCell) -> tuple[CaptureCell, int]:
    """The cell with one of its updates, of middling size, and how many it has. Attacks on sums need all of them."""
    captures = setup.plan.captures
    assert captures is not None
    if not one_by_one(cell.attack.method):
        return cell, 1
    observation = setup.observation(captures.folders[cell.number - 1], cell.updates)
    places = cell.updates if cell.updates is not None else range(len(observation.rounds))
    attacked = [number for number, seen in enumerate(observation.rounds) if seen.clients > 0]
    by_size = sorted(attacked, key=lambda number: sum(observation.rounds[number].examples or ()))
    return dataclasses.replace(cell, updates=(places[by_size[len(by_size) // 2]],)), len(attacked)


def _seconds_of_one(setup: Setup, device: str | None, cell: Cell) -> tuple[float, str]:
    if isinstance(cell, UtilityCell):
        wanted = setup.plan.utility
        assert wanted is not None
        times = len(wanted.seeds) + (len(RATES) if wanted.lr == "search" else 0)
        whole, few, more = wanted.epochs, 1, 2
    elif isinstance(cell, AttackCell | CaptureCell) and _iterations(cell.attack.method) > MORE:
        times, whole, few, more = 1, _iterations(cell.attack.method), FEW, MORE
    else:
        only = run_trial(trial_of(setup, cell), device=device)
        return only.seconds, "" if only.state == "done" else only.reason
    first = run_trial(_shortened(setup, cell, few), device=device)
    if first.state != "done":
        return first.seconds, first.reason
    short, long = (run_trial(_shortened(setup, cell, number), device=device).seconds for number in (few, more))
    if more == MORE and whole > MOST and long - short < TELLING:
        more, long = MOST, run_trial(_shortened(setup, cell, MOST), device=device).seconds
    return times * (short + (whole - few) / (more - few) * max(0.0, long - short)), ""


def _shortened(setup: Setup, cell: AttackCell | CaptureCell | UtilityCell, number: int) -> Runnable:
    """The cell with so many iterations of its attack, or epochs of one training."""
    trial = trial_of(setup, cell)
    if not isinstance(cell, UtilityCell):
        return dataclasses.replace(trial, attack=_with_iterations(cell.attack.method, number))  # type: ignore[type-var]
    assert setup.plan.utility is not None
    utility = setup.plan.utility.model_copy(update={"epochs": number, "seeds": (0,), "timed_steps": 0, "lr": RATES[0]})
    plan = setup.plan.model_copy(update={"utility": utility})
    return dataclasses.replace(trial, setup=dataclasses.replace(setup, plan=plan))  # type: ignore[type-var]


def _iterations(attack: Attack) -> int:
    """Of the attack, or of the one behind it; 0 if it has none."""
    iterations = _iterations(attack.attack) if isinstance(attack, Then) else getattr(attack, "iterations", None)
    return iterations if isinstance(iterations, int) else 0


def _with_iterations(attack: Attack, number: int) -> Attack:
    if isinstance(attack, Then):
        return dataclasses.replace(attack, attack=_with_iterations(attack.attack, number))
    return dataclasses.replace(attack, iterations=number)  # type: ignore[type-var]
