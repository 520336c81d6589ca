"""The layers of a language model that read tokens one by one, and those that read a token with what is before it.

Numbers are compared instead of code being read: two texts that differ in one token say how far each layer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.errors import NotApplicable
from fedprism.inputs import map_tensors, unflattened, values_in
from fedprism.network.first_attention import BehindFirstAttention
from fedprism.network.lookups import Lookup, _codes, _lookup
from fedprism.network.network_map import blank_batch
from fedprism.network.operations import Operation, fed_to, operations_of
from fedprism.network.torch_calls import Kind
from fedprism.types import Inputs, Observation, Update

PROBES = 5
"""Texts that are probed: more than one, and no usual length of a text."""
SHORT = 6
"""Tokens of a probed text, if the model takes texts of any length."""
READING = (Kind.DENSE, Kind.ATTENTION)
AT_ONCE = 4_000_000
"""Numbers of one layer's inputs that are computed at once: 16 megabytes in single precision."""


class Sight(StrEnum):
    """Which tokens decide what a layer is fed at a place."""

    OWN = "the token at its place"
    EARLIER = "the token at its place and those before it"
    ALL = "all tokens of the text"


class Reader(NamedTuple):
    """Layers that are fed the same numbers; `number` is that of the first of them."""

    number: int
    operations: tuple[Operation, ...]
    sight: Sight
    placed: bool
    """Whether what it is fed of a token depends on the place, too."""

    @property
    def name(self) -> str:
        return self.operations[0].weight

    def rows(self, gradient: Update) -> list[Tensor]:
        """The gradient of each of its layers (outputs, width): combinations of what they were fed."""
        return [operation.rows(gradient).detach().cpu() for operation in self.operations]


class TokenModel:
    """A model that is fed texts of up to `places` tokens out of a table of `vocabulary` rows."""

    def __init__(self, observation: Observation) -> None:
        assert observation.model is not None
        self.model, self.tensors = observation.model, observation.rounds[0].sent
        self.like = blank_batch(observation, 1)
        lookups = early_lookups(observation)
        if not lookups:
            raise NotApplicable(
                "token-inversion needs a model that looks tokens up in a table, but this model looks up none. "
                "Use gradient-matching for floating-point inputs."
            )
        self.lookup = max(lookups, key=lambda lookup: (lookup.operation.shape[0], len(lookup.entries)))
        self.vocabulary, self.places = self.lookup.operation.shape[0], len(self.lookup.entries)
        self.zeros = torch.cat([o.entries for o in lookups if o is not self.lookup] or [torch.empty(0).long()])
        self.takes_shorter = self._takes(SHORT) if self.places > SHORT else False

    @property
    def padding(self) -> int:
        """The token of places behind a text's end: no update depends on it."""
        config = getattr(self.model, "config", None)
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int) and 0 <= token < self.vocabulary:
                return token
        return int(self.lookup.operation.settings.get("padding_idx") or 0)

    def inputs(self, tokens: Tensor, lengths: Tensor | None = None) -> Inputs:
        """Texts (n, up to `places`) as the model is fed them: a mask is one at every token, all else is zero."""
        values = torch.zeros(len(tokens), values_in(self.like), dtype=torch.float64)
        rest = torch.ones(values.shape[1], dtype=torch.bool)
        rest[self.lookup.entries] = False
        rest[self.zeros] = False
        values[:, rest] = 1.0
        if lengths is not None and int(rest.sum()) == self.places:
            values[:, rest] = (torch.arange(self.places) < lengths[:, None]).double()
        texts = torch.full((len(tokens), self.places), self.padding)
        texts[:, : tokens.shape[1]] = tokens
        values[:, self.lookup.entries] = texts.double()
        return unflattened(values, self.like)

    def _short(self, tokens: Tensor) -> Inputs:
        """The same without what is behind the tokens, if the model takes shorter texts."""
        length = tokens.shape[1]
        return (
            map_tensors(lambda tensor: tensor[:, :length], self.inputs(tokens))
            if self.takes_shorter
            else (self.inputs(tokens))
        )

    def _takes(self, places: int) -> bool:
        """Whether the model also takes texts of so many tokens."""
        self.takes_shorter = True
        try:
            operations_of(self.model, self.tensors, self._short(torch.zeros(1, places).long()), BehindFirstAttention())
        except NotApplicable:
            return False
        return True

    def readers(self, gradient: Update) -> list[Reader]:
        """Every group of layers with a gradient that is fed one vector per token, in the order of execution."""
        rng = torch.Generator().manual_seed(0)
        places = SHORT if self.takes_shorter else self.places
        texts = torch.randint(0, self.vocabulary, (PROBES, places), generator=rng)
        texts[:, -1] = texts[:, 0]  # the same token at two places
        changed, middle = texts.clone(), places // 2
        changed[:, middle] = (texts[:, middle] + 1) % self.vocabulary
        operations, _ = operations_of(self.model, self.tensors, self._short(texts))
        others, _ = operations_of(self.model, self.tensors, self._short(changed))
        readers: list[Reader] = []
        for operation, other in zip(operations, others, strict=True):
            if operation.kind not in READING or operation.derived or operation.weight not in gradient:
                continue
            fed, moved = (self.by_place(each.inputs, PROBES, places) for each in (operation, other))
            if fed is None or moved is None or not bool(gradient[operation.weight].any()):
                continue
            same = [n for n, reader in enumerate(readers) if torch.equal(reader.operations[0].inputs, operation.inputs)]
            if same:
                reader = readers[same[0]]
                readers[same[0]] = reader._replace(operations=(*reader.operations, operation))
                continue
            sight = _sight((fed != moved).any(-1).any(0), middle)
            if sight is not None:
                placed = not torch.allclose(fed[:, 0], fed[:, -1], rtol=1e-5, atol=1e-5 * float(fed.abs().max()))
                readers.append(Reader(operation.number, (operation,), sight, placed))
        return readers

    def by_place(self, data: Tensor, texts: int, places: int) -> Tensor | None:
        """What a layer is fed as (texts, places, width); None if it is not one vector per token."""
        if data.dim() == 2 and len(data) == texts * places:
            return data.view(texts, places, -1)
        if data.dim() == 3 and data.shape[:2] == (texts, places):
            return data
        if data.dim() == 3 and data.shape[:2] == (places, texts):
            return data.transpose(0, 1)
        return None

    def fed(self, readers: Sequence[Reader], tokens: Tensor) -> list[Tensor]:
        """What each of the readers is fed at the last token of texts (n, t): (n, width) each."""
        length = tokens.shape[1]
        places = length if self.takes_shorter else self.places
        width = max(reader.operations[0].inputs.shape[-1] for reader in readers)
        pieces = []
        for part in torch.split(tokens, max(1, AT_ONCE // width // places)):
            fed = fed_to(self.model, self.tensors, self._short(part), [reader.number for reader in readers])
            data = [self.by_place(fed[reader.number], len(part), places) for reader in readers]
            pieces.append([each[:, length - 1].cpu() for each in data if each is not None])
        return [torch.cat(column) for column in zip(*pieces, strict=True)]

    def fed_by(self, readers: Sequence[Reader]) -> Callable[[Tensor], list[Tensor]]:
        """A function of texts (n, t) that says what the readers are fed at the last token."""
        return partial(self.fed, readers)

    def drift(self, reader: Reader, delta: Update) -> float:
        """How far what a reader is fed of a text moves, relative to its size, when the parameters move by `delta`."""
        text = torch.arange(SHORT if self.takes_shorter else self.places)[None] % self.vocabulary
        before, tensors = self.fed([reader], text)[0], self.tensors
        moved = {name: tensors[name] + delta[name].to(tensors[name]) for name in delta.keys() & tensors.keys()}
        try:
            self.tensors = {**tensors, **moved}
            after = self.fed([reader], text)[0]
        finally:
            self.tensors = tensors
        return float((after - before).norm() / before.norm())

    def dictionary(self, reader: Reader, tokens: Tensor, place: int = 0) -> Tensor:
        """What a reader of single tokens is fed of each of the tokens at a place: (tokens, width)."""
        return self.fed([reader], tokens[:, None].expand(-1, place + 1))[0]


def early_lookups(observation: Observation) -> list[Lookup]:
    """Which entries are looked up in which table before the first attention, as they are."""
    blank = blank_batch(observation, 1)
    codes = _codes(values_in(blank))
    assert observation.model is not None
    inputs = unflattened(codes, blank_batch(observation, len(codes)))
    operations, _ = operations_of(observation.model, observation.rounds[0].sent, inputs, BehindFirstAttention())
    lookups = [_lookup(operation, codes) for operation in operations if operation.kind is Kind.EMBEDDING]
    return [lookup for lookup in lookups if lookup is not None and not bool(lookup.offsets.any())]


def _sight(changed: Tensor, middle: int) -> Sight | None:
    """How far a layer sees, by the places (places,) at which it is fed something else if the middle token changes."""
    if not bool(changed[middle]):
        return None
    if bool(changed[:middle].any()):
        return Sight.ALL
    return Sight.EARLIER if bool(changed[middle + 1 :].any()) else Sight.OWN
