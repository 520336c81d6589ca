"""What the layers of a language model say of an update: row spaces, the tokens in them, and the texts they make up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.client.observed import local_steps
from fedprism.errors import NotApplicable
from fedprism.network.token_layers import Reader, Sight, TokenModel
from fedprism.solvers.tokens.prefixes import PrefixStatus, Texts, grow, pursue_texts
from fedprism.solvers.tokens.pursuit import MOST_INSIDE, PursuitStatus, pursue
from fedprism.solvers.tokens.span import RowSpace, in_span, row_space
from fedprism.types import Observation, Update

DIFFERENCE_ROUNDING = 0.3
"""Deviation of a difference of two parameters, in units of the precision of the largest: even over one step."""
MOST_DRIFT = 0.1
"""Part by which what a layer is fed may move during several local steps."""
MOST_LAYERS = 16
"""Layers whose row spaces say together which token comes next, if each of them says little."""
SURE_LAYERS = 3
"""Layers whose row spaces say which texts are there, if each says it alone."""


@dataclass(frozen=True)
class Reading:
    """A group of layers and the row space of its gradients, computed when it is asked for."""

    reader: Reader
    rows: tuple[Tensor, ...]
    error: float

    @cached_property
    def space(self) -> RowSpace:
        return row_space(self.rows, self.error)

    @property
    def width(self) -> int:
        return self.rows[0].shape[1]

    @property
    def height(self) -> int:
        """Most directions that its gradients can have."""
        return min(self.width, sum(len(each) for each in self.rows))


class Found(NamedTuple):
    """Tokens of a batch. `at` (places, tokens): which of them may stand where; None if that is not told."""

    tokens: Tensor
    at: Tensor | None
    status: PursuitStatus
    greedy: int
    reading: Reading

    def at_place(self, place: int) -> Tensor:
        return self.tokens if self.at is None else self.tokens[self.at[place]]


def readings(observation: Observation, model: TokenModel, gradient: Update) -> list[Reading]:
    """All layers that are fed one vector per token; of several local steps, those that were fed nearly the same."""
    several = observation.round.kind == "delta" and local_steps(observation.round, observation.knowledge) != 1
    found = []
    for reader in model.readers(gradient):
        drift = model.drift(reader, observation.round.update) if several else 0.0
        if drift < MOST_DRIFT:
            rows = tuple(reader.rows(gradient))
            found.append(Reading(reader, rows, max(_difference_error(observation, reader), drift * _size(rows))))
    return found


def _size(rows: tuple[Tensor, ...]) -> float:
    """The deviation of white noise that is as large in some direction as these gradients are."""
    return max(float(each.double().norm()) / (math.sqrt(len(each)) + math.sqrt(each.shape[1])) for each in rows)


def _difference_error(observation: Observation, reader: Reader) -> float:
    """The deviation of the entries of a difference of parameters by the rounding of these."""
    if observation.round.kind != "delta":
        return 0.0
    used = [observation.round.params[operation.weight] for operation in reader.operations]
    return max(DIFFERENCE_ROUNDING * torch.finfo(each.dtype).eps * float(each.abs().max()) for each in used)


def find_tokens(model: TokenModel, layers: list[Reading]) -> Found:
    """The tokens of the batch, by the layers that are fed each token by itself."""
    own = [reading for reading in layers if reading.reader.sight is Sight.OWN]
    everything = torch.arange(model.vocabulary)
    reading = _fullest(own)
    if reading is None:
        reading = max(own, key=lambda each: each.width)
        if reading.reader.placed:
            return Found(everything[:0], None, PursuitStatus.CROWDED, 0, reading)
    if not reading.reader.placed:
        pursuit = pursue(reading.space, model.dictionary(reading.reader, everything))
        return Found(pursuit.chosen.sort().values, None, pursuit.status, pursuit.greedy, reading)
    inside = [
        in_span(model.dictionary(reading.reader, everything, place), reading.space).inside
        for place in range(model.places)
    ]
    tokens = torch.stack(inside).any(0).nonzero().flatten()
    if len(tokens) > MOST_INSIDE * model.vocabulary:
        return Found(everything[:0], None, PursuitStatus.CROWDED, 0, reading)
    return Found(tokens, torch.stack(inside)[:, tokens], PursuitStatus.SPANNED, 0, reading)


def _fullest(readings: list[Reading]) -> Reading | None:
    """Of the layers that hold all that they were fed, one that was fed most: others got no error at some places."""
    complete = [reading for reading in readings if reading.space.complete]
    return max(complete, key=lambda each: (each.space.rank, each.width), default=None)


def find_texts(model: TokenModel, layers: list[Reading], found: Found, samples: int | None) -> Texts | None:
    """The texts that the tokens make up, by the layers that see earlier tokens, too; None if no layer tells."""
    mixing = [reading for reading in layers if reading.reader.sight is Sight.EARLIER]
    if not len(found.tokens):
        return None
    if found.at is not None and int(found.at.sum(1).max()) == 1:  # one token at most at each place: a single text
        held = found.at.any(1)
        if bool(held[: int(held.sum())].all()):
            return Texts([found.tokens[found.at[held].long().argmax(1)]], PrefixStatus.GROWN)
    if not mixing:
        return None
    # Layers with fewer rows than texts have beginnings hold none of these by themselves.
    highest = max(reading.height for reading in mixing)
    sure = [reading for reading in mixing if reading.height == highest][: SURE_LAYERS + 1]
    fullest = _fullest(sure)
    if fullest is not None:
        complete = [r for r in sure if r.space.complete and r.space.rank == fullest.space.rank][:SURE_LAYERS]
        return grow(
            _feeding(model, complete),
            [reading.space for reading in complete],
            found.at_place,
            places=model.places,
            most=fullest.space.rank,
        )
    open_layers = [r for r in mixing if r.height == highest < r.width][:MOST_LAYERS]
    if not open_layers:
        return None
    return pursue_texts(
        model.fed_by([reading.reader for reading in open_layers]),
        [reading.space for reading in open_layers],
        found.at_place,
        places=model.places,
        one=samples == 1,
    )


def _feeding(model: TokenModel, layers: list[Reading]) -> Callable[[int, Tensor], Tensor]:
    def fed(number: int, texts: Tensor) -> Tensor:
        return model.fed([layers[number].reader], texts)[0]

    return fed


def own_layers(layers: list[Reading]) -> list[Reading]:
    """Layers that are fed each token by itself; without one nothing tells tokens."""
    own = [reading for reading in layers if reading.reader.sight is Sight.OWN]
    if not own:
        raise NotApplicable(
            "token-inversion needs an update of a layer that is fed each token by itself, such as the projections of "
            "the first attention or adapters on them, but there is none that is not zero and is fed nearly the "
            "same in all of local training; of heads, prefixes or deeper layers alone, labels may still be told."
        )
    return own
