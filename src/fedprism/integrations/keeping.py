"""Which rounds and layers of a long run go to the disk, and how much of it they may take."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fedprism.errors import BadInput
from fedprism.types import Update

GIGABYTE = 10**9
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is kept of a run. Of all rounds the facts are written down; this chooses whose updates are.

    every: each so many rounds, from the first on. rounds: these and no others. layers: names of parameters, with `*`
    for any letters; models are always kept whole. most_gigabytes: what the recording may take on the disk.
    """

    every: int = 1
    rounds: Collection[int] | None = None
    layers: Collection[str] | None = None
    most_gigabytes: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise BadInput(f"every must be a whole number from 1 on, not {self.every!r}. 5 keeps each fifth round.")
        if isinstance(self.layers, str) or (self.layers is not None and not self.layers):
            raise BadInput(f"layers must be a list of names, not {self.layers!r}. ['fc.*'] keeps those of fc.")
        if not self.most_gigabytes > 0:
            raise BadInput(f"most_gigabytes must be above 0, not {self.most_gigabytes!r}. 10 is usual.")

    def wants(self, index: int, first: int) -> bool:
        """Whether the updates of this round are kept; `first` is the number of the run's first round."""
        return (self.rounds is None or index in self.rounds) and (index - first) % self.every == 0

    def chosen(self, update: Update) -> Update:
        """The layers of an update that are kept."""
        if self.layers is None:
            return update
        return {name: t for name, t in update.items() if any(fnmatchcase(name, pattern) for pattern in self.layers)}


def size_of(tensors: Iterable[Update]) -> int:
    """Bytes of mappings of tensors, each object counted once."""
    different = {id(each): each for each in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for each in different for tensor in each.values())
