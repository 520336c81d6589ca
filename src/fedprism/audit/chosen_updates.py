"""Which updates of a long recording are attacked one by one, and why these: the time of an audit has to be bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedprism.attacks import UpdateAttack
from fedprism.naming import counted
from fedprism.types import Observation, Round

MOST_LETTERS = 40
"""Letters of a client's name that a sentence shows."""
MOST_LISTED = 24
"""Updates that a sentence lists; records name each one that was attacked."""


@dataclass(frozen=True, kw_only=True)
class ChosenUpdate:
    place: int
    """Among the updates of the capture, from 0 on."""
    round: int
    client: str | None
    """Whose update it is, where that is one client and known."""
    why: str

    def __str__(self) -> str:
        return f"round {self.round}" + ("" if self.client is None else f" of {self.client[:MOST_LETTERS]}")


def one_by_one(attack: object) -> bool:
    """Whether an attack answers for each update by itself; others need all rounds together."""
    return isinstance(attack, UpdateAttack)


def number_of_updates(observation: Observation) -> int:
    """Sums over nobody are none."""
    return sum(seen.clients > 0 for seen in observation.rounds)


def chosen_updates(observation: Observation, most: int) -> tuple[ChosenUpdate, ...]:
    """At most so many updates, in their order; all of them where there are no more.

    Each rule names one after the other in its turn: the first round and the last (what training changes), the fewest
    clients and samples (which hide each other least), and the longest update (which noise and clipping hide least).
    """
    attacked = [place for place, seen in enumerate(observation.rounds) if seen.clients > 0]
    if len(attacked) <= most:
        return tuple(_chosen(observation.rounds, place, "") for place in attacked)
    orders = {why: sorted(attacked, key=key) for why, key in _rules(observation, attacked).items()}
    chosen: dict[int, str] = {}
    while len(chosen) < most:
        for why, order in orders.items():
            if len(chosen) < most:
                chosen[next(place for place in order if place not in chosen)] = why
    return tuple(_chosen(observation.rounds, place, chosen[place]) for place in sorted(chosen))


def why_not_others(chosen: Sequence[ChosenUpdate], updates: int) -> str:
    """By which rules these were chosen out of so many."""
    groups: dict[str, list[str]] = {}
    for each in chosen[:MOST_LISTED]:
        groups.setdefault(each.why, []).append(str(each))
    told = "; ".join(f"{why}: {', '.join(names)}" for why, names in groups.items())
    more = f"; and {len(chosen) - MOST_LISTED} more, which the records name" if len(chosen) > MOST_LISTED else ""
    return (
        f"{counted(len(chosen), 'update')} of {updates} are attacked one by one ({told}{more}); captures.most_updates "
        "in the plan changes how many"
    )


def _chosen(rounds: Sequence[Round], place: int, why: str) -> ChosenUpdate:
    seen = rounds[place]
    named = seen.participants[0] if seen.participants and seen.clients == 1 else None
    return ChosenUpdate(place=place, round=seen.index, client=named, why=why)


def _rules(observation: Observation, places: Sequence[int]) -> dict[str, Callable[[int], Any]]:
    """By which key each rule orders updates; the best comes first. What all have in common decides nothing."""
    sizes = {place: _size(observation, place) for place in places}
    lengths = {place: _length(observation.rounds[place]) for place in places}
    index = {place: observation.rounds[place].index for place in places}
    rules: dict[str, Callable[[int], Any]] = {
        "the first round": lambda place: (index[place], sizes[place], place),
        "the last round": lambda place: (-index[place], sizes[place], place),
        "the fewest clients and samples": lambda place: (sizes[place], -lengths[place], place),
        "the longest update": lambda place: (-lengths[place], place),
    }
    if len(set(sizes.values())) == 1:
        del rules["the fewest clients and samples"]
    return rules


def _size(observation: Observation, place: int) -> tuple[int, float]:
    """Clients and samples behind an update; where nobody tells how many samples, that decides nothing."""
    seen, known = observation.rounds[place], observation.knowledge.batch_size
    if seen.examples is not None:
        return seen.clients, sum(seen.examples)
    return seen.clients, known[place] if isinstance(known, tuple) and len(known) > place else math.inf


def _length(seen: Round) -> float:
    """The Euclidean length of an update, one tensor at a time: updates of a long recording are larger than memory."""
    squares = (t.double().square().sum() for t in seen.update.values() if t.dtype.is_floating_point)
    return math.sqrt(float(sum(squares, torch.zeros((), dtype=torch.float64))))
