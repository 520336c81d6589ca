"""Plays the cells of a table: every method on the same answers of clients, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.errors import out_of_memory
from fedprism.recipes.base import Announce, Entry, Settings
from fedprism.recipes.measuring import NOT_APPLICABLE, OUT_OF_MEMORY, Cell, Run, mean_lpips, outcome, run
from fedprism.recipes.parts import Part, computed
from fedprism.recipes.shelf import Made


class Game(NamedTuple):
    """What is played: the methods on every batch of the cell, but slow ones on the first few only (`fewer`)."""

    cell: Cell
    methods: Mapping[str, Attack]
    title: str
    fewer: Mapping[str, int] = MappingProxyType({})

    def batches(self, method: str) -> int:
        return min(self.cell.batches, self.fewer.get(method, self.cell.batches))


class Played(NamedTuple):
    entries: dict[str, Entry]
    notes: tuple[str, ...]
    """Why a method has no numbers."""


def play(cell: Cell, methods: Mapping[str, Attack], settings: Settings, announce: Announce, title: str) -> Played:
    """What each method makes of the cell. A method that runs out of memory or does not apply is left at that word."""
    return next(play_all([Game(cell, methods, title)], replace(settings, workers=None), announce))


def play_all(games: Sequence[Game], settings: Settings, announce: Announce) -> Iterator[Played]:
    """What each method makes of each cell, one cell after the other."""
    if not settings.quick:
        blank = torch.zeros(1, 3, 64, 64)
        mean_lpips(blank, blank, settings)  # it is missed before hours of computation, not after them
    runs: list[dict[str, dict[int, Run]]] = [{name: {} for name in game.methods} for game in games]
    failed: list[dict[str, Made]] = [{} for _ in games]

    def tries() -> Iterator[Try]:
        for place, game in enumerate(games):
            for number in range(game.cell.batches):
                for name, attack in game.methods.items():
                    if name not in failed[place] and number < game.batches(name):
                        yield Try(game.cell, place, number, name, attack, game.title)

    def finished(place: int) -> bool:
        game = games[place]
        return all(name in failed[place] or len(done) == game.batches(name) for name, done in runs[place].items())

    next_one = 0
    for part, made in computed(tries(), settings, announce):
        assert isinstance(part, Try)
        if "failed" in made.said:
            failed[part.place][part.name] = made
        else:
            runs[part.place][part.name][part.number] = _unpacked(made)
        while next_one < len(games) and finished(next_one):
            yield _played(games[next_one], runs[next_one], failed[next_one])
            next_one += 1


@dataclass(frozen=True)
class Try(Part):
    """One method on one batch of a cell; `place` is the cell's in the table."""

    cell: Cell
    place: int
    number: int
    name: str
    attack: Attack
    about: str

    @property
    def title(self) -> str:
        return f"{self.about}, batch {self.number + 1} of {self.cell.batches}: {self.name}"

    @property
    def effort(self) -> float:
        return float(self.cell.size)

    def make(self, settings: Settings) -> Made:
        observation, truth = _observed(self.cell, self.number, settings)
        try:
            return _packed(run(self.cell.victim, self.attack, observation, truth, settings))
        except fp.NotApplicable as reason:
            return Made({"failed": NOT_APPLICABLE, "reason": str(reason)}, {})
        except Exception as error:
            if not out_of_memory(error) or (settings.workers or 1) > 1:  # alone there may be enough
                raise
            return Made({"failed": OUT_OF_MEMORY}, {})


@lru_cache(maxsize=1)
def _observed(cell: Cell, number: int, settings: Settings) -> tuple[fp.Observation, fp.Truth]:
    """The same for every method, one after the other."""
    return cell.observe(number, settings)


def _packed(found: Run) -> Made:
    tensors = {} if found.cosines is None else {"cosines": found.cosines}
    if found.pictures is not None:
        tensors |= dict(zip(("originals", "recovered"), found.pictures, strict=True))
    return Made({"values": found.values, "seconds": found.seconds, "status": found.status}, tensors)


def _unpacked(made: Made) -> Run:
    said, tensors = made
    pictures = (tensors["originals"], tensors["recovered"]) if "originals" in tensors else None
    return Run(said["values"], said["seconds"], said["status"], pictures, tensors.get("cosines"))


def _played(game: Game, runs: Mapping[str, Mapping[int, Run]], failed: Mapping[str, Made]) -> Played:
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    for name, attack in game.methods.items():
        if name not in failed:
            entries[name] = outcome(attack, [runs[name][number] for number in range(game.batches(name))])
            continue
        said = failed[name].said
        entries[name] = str(said["failed"])
        if "reason" in said:
            notes.append(f"{game.title}, {name}: {said['reason']}")
    return Played(entries, tuple(notes))
