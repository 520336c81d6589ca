"""The independent parts of a long recipe: several of them at a time, each on disk as soon as it is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from fedprism.errors import FedprismError, about_memory
from fedprism.executing import Failure, Processes
from fedprism.recipes.base import Announce, Settings
from fedprism.recipes.shelf import Made, Shelf


class Part(ABC):
    """Something that can be computed by itself. Its `repr` says which one it is, and a process can be sent it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is being done, for whoever waits."""

    @property
    def effort(self) -> float:
        """How long it takes, beside other parts: where several are made at a time, the longest are begun first."""
        return 1.0

    @abstractmethod
    def make(self, settings: Settings) -> Made: ...


def computed(parts: Iterable[Part], settings: Settings, announce: Announce) -> Iterator[tuple[Part, Made]]:
    """Each part with what it came to, as they are ready: in their order, unless several are made at a time.

    One at a time, the next part is asked for when the last one is there. What runs out of memory beside others is made
    again when they are done, alone.
    """
    if (settings.workers or 1) > 1:
        queue, parts = sorted(parts, key=lambda part: -part.effort), list[Part]()
        announce(f"{len(queue)} parts, {settings.workers} at a time")
        run = Processes(workers=settings.workers).run(partial(computed_part, settings=settings), queue)
        for done, (number, outcome) in enumerate(run, start=1):
            part = queue[number]
            if not isinstance(outcome, Failure):
                yield part, outcome
            elif about_memory(outcome.reason):
                parts.append(part)
            else:
                raise FedprismError(f"{part.title}: {outcome.reason}")
            announce(f"{done} of {len(queue)} parts, {settings.workers} at a time; last: {part.title}")
    for part in parts:
        announce(part.title)
        yield part, computed_part(part, replace(settings, workers=None))


def computed_part(part: Part, settings: Settings) -> Made:
    """The part as it was made, now or in an earlier run."""
    decisive = ("seed", "quick", "iterations", "batches", "inverted", "narrow")
    key = {"part": repr(part), **{name: getattr(settings, name) for name in decisive}}
    return Shelf(settings.finished).made(key, lambda: part.make(settings))
