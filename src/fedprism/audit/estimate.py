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

from fedprism import devices
from fedprism.audit.cell import run_cell
from fedprism.audit.entries import AttackEntry
from fedprism.audit.grid import Cell, Grid, UtilityCell
from fedprism.audit.materials import Setup
from fedprism.executing import Failure, Processes

FEW, MORE = 2, 22
"""Iterations of a shortened attack: what more of them take is what an iteration takes, the rest happens once a cell."""
PATIENCE = 45.0
"""Seconds that a cell's shortened forms may take, the process's start included; more is told as at least that."""
MOST_WAITED_FOR = 2
"""Cells that may take too long before no further ones are tried."""
MOST_PROBES = 12
CONTEXT = 700 * 2**20
"""What a process takes of a GPU's memory before it does anything."""
RESERVE = 1.2
"""By how much more than a shortened cell a whole one may take."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    seconds: float
    at_least: bool
    """Whether a shortened cell did not finish, so that it may take much longer."""
    memory: int
    """Bytes that one worker takes of the machine's memory; 0 where nobody knows."""
    gpu_memory: int

    def __str__(self) -> str:
        bound = "at least " if self.at_least else "about "
        gpu = f" and {_megabytes(self.gpu_memory)} of the GPU's" if self.gpu_memory else ""
        memory = f"{_megabytes(self.memory)} of memory{gpu} a worker" if self.memory else "of unknown memory"
        return f"{bound}{duration(self.seconds)} with one worker, {memory}"


class _Probe(NamedTuple):
    seconds: float
    memory: int
    gpu_memory: int


def estimate(setup: Setup, grid: Grid, device: str | None = None) -> Estimate:
    """Run the first cell of each kind in shortened form, in a process of its own, and scale up."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in grid.cells:
        groups.setdefault(_sort(cell), []).append(cell)
    chosen = list(groups.values())[:MOST_PROBES]
    probes = _probes(setup, device, [members[0] for members in chosen])
    seconds = [PATIENCE if probe is None else probe.seconds for probe in probes]
    known = sum(each * len(members) for each, members in zip(seconds, chosen, strict=True))
    others = len(grid.cells) - sum(map(len, chosen))
    total = known + others * math.fsum(seconds) / len(seconds)
    return Estimate(
        seconds=total,
        at_least=None in probes,
        memory=max((probe.memory for probe in probes if probe is not None), default=0),
        gpu_memory=max((probe.gpu_memory for probe in probes if probe is not None), default=0),
    )


def workers_that_fit(setup: Setup, grid: Grid, workers: int, device: torch.device) -> int:
    """How many workers the GPU has memory for, by the largest cell of each method; on the CPU as many as asked for.

    What a cell that took too long needs, nobody knows: then cells that run out of memory are tried again alone.
    """
    if device.type != "cuda" or workers == 1 or not grid.cells:
        return workers
    largest: dict[tuple[str, str], Cell] = {}
    for cell in sorted(grid.cells, key=_size):
        largest[cell.kind, str(cell.described().get("settings"))] = cell
    chosen = sorted(largest.values(), key=_size, reverse=True)[:MOST_PROBES]
    needed = max((probe.gpu_memory for probe in _probes(setup, str(device), chosen) if probe is not None), default=0)
    free, _ = torch.cuda.mem_get_info(device)
    return fitting(workers, free, needed)


def fitting(workers: int, free: int, needed: int) -> int:
    """How many workers that each need so many bytes of a GPU fit into what is free; at least one."""
    return max(1, min(workers, int(free // (RESERVE * needed + CONTEXT))))


def _size(cell: Cell) -> int:
    """Samples of a cell: what its memory grows with."""
    return int(getattr(cell, "batch_size", 0) * getattr(cell, "clients", 1))


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _probes(setup: Setup, device: str | None, cells: Sequence[Cell]) -> list[_Probe | None]:
    found: list[_Probe | None] = [None] * len(cells)
    missed = 0
    for index, outcome in Processes(workers=1, timeout=PATIENCE).run(partial(_probe, setup, device), cells):
        found[index] = None if isinstance(outcome, Failure) else outcome
        missed += isinstance(outcome, Failure)
        if missed == MOST_WAITED_FOR:
            break
    return found


def _probe(setup: Setup, device: str | None, cell: Cell) -> _Probe:
    setup.materials()  # loaded once a worker, so not part of a cell's time
    place = devices.pick(device)
    if place.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before that there is no peak to forget
        torch.cuda.reset_peak_memory_stats(place)
    seconds = _seconds(setup, device, cell)
    # What is reserved, not what is used of it: the rest is not there for others either.
    taken = torch.cuda.max_memory_reserved(place) if place.type == "cuda" else 0
    return _Probe(seconds, _peak_memory(), taken)


def _seconds(setup: Setup, device: str | None, cell: Cell) -> float:
    """What a whole cell takes, told by two shortened ones. What a process does once only is over before they start."""

    def taken(setup: Setup, cell: Cell) -> float:
        return run_cell(setup, device, cell).seconds

    if isinstance(cell, UtilityCell):
        wanted = setup.plan.utility
        assert wanted is not None
        once, twice = _training(setup, 1), _training(setup, 2)
        taken(once, cell)
        short, long = taken(once, cell), taken(twice, cell)
        return len(wanted.seeds) * _extended(short, long, wanted.epochs - 1)
    whole = _iterations(cell.attack)
    if whole is None or whole <= MORE:
        return taken(setup, cell)
    few, more = (dataclasses.replace(cell, attack=_shortened(cell.attack, number)) for number in (FEW, MORE))
    taken(setup, few)
    short, long = taken(setup, few), taken(setup, more)
    return _extended(short, long, (whole - FEW) / (MORE - FEW))


def _extended(short: float, long: float, times: float) -> float:
    return short + times * max(0.0, long - short)


def _training(setup: Setup, epochs: int) -> Setup:
    """The audit with so many epochs of one seed's training."""
    wanted = setup.plan.utility
    assert wanted is not None
    short = wanted.model_copy(update={"epochs": epochs, "seeds": wanted.seeds[:1], "timed_steps": 0})
    setup = dataclasses.replace(setup, plan=setup.plan.model_copy(update={"utility": short}))
    setup.materials()
    return setup


def _iterations(entry: AttackEntry) -> int | None:
    """Of the attack, or of the one behind it; None where it has none."""
    if entry.then is not None:
        return _iterations(entry.then)
    iterations = getattr(entry.make(), "iterations", None)
    return iterations if isinstance(iterations, int) else None


def _shortened(entry: AttackEntry, iterations: int) -> AttackEntry:
    if entry.then is not None:
        return entry.model_copy(update={"then": _shortened(entry.then, iterations)})
    return entry.model_copy(update={"settings": {**entry.settings, "iterations": iterations}})


def _sort(cell: Cell) -> tuple[object, ...]:
    """Cells that take about as long as each other."""
    return (cell.kind, *(str(cell.described().get(key)) for key in ("settings", "batch_size", "clients", "protocol")))


def _peak_memory() -> int:
    """The most that this process has had in memory, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _megabytes(count: int) -> str:
    return f"{count / 2**20:.0f} MB"
