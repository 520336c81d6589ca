"""What the layers of a language model say of an update: row spaces, the tokens in them, and the texts they make up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.client.observed import local_steps
from fedprism.errors import NotApplicable
from fedprism.network.token_layers import Reader, Sight, TokenModel
from fedprism.solvers.tokens.prefixes import Texts, grow, pursue_text
from fedprism.solvers.tokens.pursuit import MOST_INSIDE, PursuitStatus, pursue
from fedprism.solvers.tokens.span import RowSpace, in_span, row_space
from fedprism.types import Observation, Update

DIFFERENCE_ROUNDING = 0.3
"""Deviation of a difference of two parameters, in units of the precision of the largest: even over one step."""
MOST_LAYERS = 8
"""Layers whose row spaces say which token comes next, if each of them says little."""
SURE_LAYERS = 3
"""Layers whose row spaces say which texts are there, if each says it alone."""


class Reading(NamedTuple):
    """A group of layers and the row space of its gradients."""

    reader: Reader
    space: RowSpace


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
    """The row spaces of all layers that are fed one vector per token."""
    several = observation.round.kind == "delta" and local_steps(observation.round, observation.knowledge) != 1
    readers = model.readers(gradient)
    if several:
        readers = [reader for reader in readers if not model.moves(reader, gradient)]
    return [Reading(reader, _space(observation, reader, gradient)) for reader in readers[:MOST_LAYERS]]


def _space(observation: Observation, reader: Reader, gradient: Update) -> RowSpace:
    params = observation.round.params
    error = 0.0
    if observation.round.kind == "delta":
        used = [params[operation.weight] for operation in reader.operations]
        error = max(DIFFERENCE_ROUNDING * torch.finfo(each.dtype).eps * float(each.abs().max()) for each in used)
    return row_space(reader.rows(gradient), error)


def find_tokens(model: TokenModel, layers: list[Reading]) -> Found:
    """The tokens of the batch, by the layers that are fed each token by itself."""
    own = [reading for reading in layers if reading.reader.sight is Sight.OWN]
    everything = torch.arange(model.vocabulary)
    reading = _fullest(own)
    if reading is None:
        reading = max(own, key=lambda each: each.space.basis.shape[1])
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
    return max(complete, key=lambda each: (each.space.rank, each.space.basis.shape[1]), default=None)


def find_texts(model: TokenModel, layers: list[Reading], found: Found, samples: int | None) -> Texts | None:
    """The texts that the tokens make up, by the layers that see earlier tokens, too; None if no layer tells."""
    mixing = [
        reading
        for reading in layers
        if reading.reader.sight is Sight.EARLIER and 0 < reading.space.rank < reading.space.basis.shape[1]
    ]
    fullest = _fullest(mixing)
    complete = [r for r in mixing if fullest and r.space.complete and r.space.rank == fullest.space.rank][:SURE_LAYERS]
    if not len(found.tokens) or not mixing:
        return None
    if not complete:
        if samples != 1:
            return None
        fed = _feeding(model, mixing)
        return pursue_text(fed, [reading.space for reading in mixing], found.at_place, places=model.places)
    most = min(reading.space.rank for reading in complete)
    return grow(
        _feeding(model, complete),
        [reading.space for reading in complete],
        found.at_place,
        places=model.places,
        most=most,
    )


def _feeding(model: TokenModel, layers: list[Reading]):  # type: ignore[no-untyped-def]
    def fed(number: int, texts: Tensor) -> Tensor:
        return model.fed([layers[number].reader], texts)[0]

    return fed


def own_layers(layers: list[Reading]) -> list[Reading]:
    """Layers that are fed each token by itself; without one nothing tells tokens."""
    own = [reading for reading in layers if reading.reader.sight is Sight.OWN]
    if not own:
        raise NotApplicable(
            "token-inversion expects a gradient of a layer that is fed each token by itself, such as the projections "
            "of the first attention or adapters on them, found none but zeros; if only a head, prefixes or deeper "
            "layers are trained, the tokens stay hidden from it and labels may still be told."
        )
    return own
