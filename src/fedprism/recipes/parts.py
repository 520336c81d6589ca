"""The independent parts of a long recipe: several of them at a time, each on disk as soon as it is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

from fedprism.errors import FedprismError
from fedprism.executing import Failure, Processes
from fedprism.recipes.base import Announce, Settings
from fedprism.recipes.shelf import Made, Shelf


class Part(ABC):
    """Something that can be computed by itself. Its `repr` says which one it is, and a process can be sent it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is being done, for whoever waits."""

    @abstractmethod
    def make(self, settings: Settings) -> Made: ...


def computed(parts: Sequence[Part], settings: Settings, announce: Announce) -> Iterator[tuple[int, Made]]:
    """(number of the part, what it came to), as they are ready: in their order, unless several are made at a time."""
    if (settings.workers or 1) == 1:
        for number, part in enumerate(parts):
            announce(part.title)
            yield number, computed_part(part, settings)
        return
    announce(f"{len(parts)} parts, {settings.workers} at a time")
    outcomes = Processes(workers=settings.workers).run(partial(computed_part, settings=settings), parts)
    for done, (number, outcome) in enumerate(outcomes, start=1):
        if isinstance(outcome, Failure):
            raise FedprismError(f"{parts[number].title}: {outcome.reason}")
        announce(f"{done} of {len(parts)} parts are there, {settings.workers} at a time; last: {parts[number].title}")
        yield number, outcome


def computed_part(part: Part, settings: Settings) -> Made:
    """The part as it was made, now or in an earlier run."""
    decisive = ("seed", "quick", "iterations", "batches")
    key = {"part": repr(part), **{name: getattr(settings, name) for name in decisive}}
    return Shelf(settings.finished).made(key, lambda: part.make(settings))
