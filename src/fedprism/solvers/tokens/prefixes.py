"""Texts out of the row spaces of layers that see a token together with those before it: grown token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.tokens.pursuit import needed_for
from fedprism.solvers.tokens.span import DEVIATIONS, LEAST_ERROR, RowSpace, in_span

Fed = Callable[[int, Tensor], Tensor]
"""(number of a layer, texts (n, t)) -> what that layer is fed at the last token of each text, (n, width)."""
FedAll = Callable[[Tensor], list[Tensor]]
"""Texts (n, t) -> what each layer is fed at the last token of each text, (n, width)."""
Tokens = Callable[[int], Tensor]
"""The tokens that may stand at a place."""


NOTHING = torch.zeros(0, dtype=torch.long)
"""The text before its first token."""
MOST_STARTS = 16
"""First tokens that are tried for a single text, the likeliest first."""
MOST_BEGINNINGS = 256
"""Beginnings of texts after which a pursuit is given up."""
LEAST_OPEN = 0.03
"""Sine of the angle to the vectors taken from which a vector can still be told from them."""


class PrefixStatus(StrEnum):
    GROWN = "no text can be made longer"
    TOO_MANY = "more beginnings of texts fit the row spaces than there can be"
    STUCK = "no token makes the text longer, although its rows are not explained"


class Texts(NamedTuple):
    texts: list[Tensor]
    status: PrefixStatus


def grow(fed: Fed, spaces: Sequence[RowSpace], tokens: Tokens, *, places: int, most: int) -> Texts:
    """Every text of up to `places` tokens whose beginnings are all in every row space; at most `most` at each length.

    A text that is the beginning of another one is not told from it, and left out.
    """
    prefixes, finished = torch.zeros(1, 0, dtype=torch.long), list[Tensor]()
    for place in range(places):
        fitting = tokens(place)
        longer = torch.cat([prefixes.repeat_interleave(len(fitting), 0), fitting.repeat(len(prefixes))[:, None]], dim=1)
        for number, space in enumerate(spaces):
            if len(longer):
                longer = longer[in_span(fed(number, longer), space).inside]
        kept = {tuple(text[:-1].tolist()) for text in longer}
        finished += [prefix for prefix in prefixes if place and tuple(prefix.tolist()) not in kept]
        if len(longer) > most:
            return Texts(finished, PrefixStatus.TOO_MANY)
        prefixes = longer
        if not len(prefixes):
            break
    return Texts(_without_repeats([*finished, *prefixes]), PrefixStatus.GROWN)


def _without_repeats(texts: list[Tensor]) -> list[Tensor]:
    """Leave out texts of one repeated token: attention makes the same of them as of that token alone."""
    alone = [text for text in texts if len(torch.unique(text)) == 1]
    others = [text for text in texts if len(torch.unique(text)) > 1]
    first = {int(text[0]) for text in others}
    return others + [torch.tensor([token]) for token in sorted({int(text[0]) for text in alone} - first)]


def pursue_texts(
    fed: FedAll, spaces: Sequence[RowSpace], tokens: Tokens, *, places: int, one: bool, most: int = MOST_BEGINNINGS
) -> Texts:
    """Texts whose beginnings explain the rows of all layers, though each has fewer rows than there are beginnings.

    The beginning comes next that fills most of what is left of the row spaces, all layers together. `one`: whether
    there is one text, so each beginning is the one before and a token more.
    """
    if not one:
        return _pursued(fed, spaces, tokens, _longer([NOTHING], tokens(0)), places=places, one=False, most=most)
    # What deep layers are fed of a first token depends little on it: the next ones tell whether it was right.
    first = _Pool(fed, spaces)
    first.add(_longer([NOTHING], tokens(0)))
    starts = first.shares().argsort(descending=True)[:MOST_STARTS]
    for start in starts.tolist():
        found = _pursued(fed, spaces, tokens, first.texts[start][None], places=places, one=True, most=places)
        if found.status is PrefixStatus.GROWN:
            return found
    return Texts([], PrefixStatus.STUCK)


def _pursued(
    fed: FedAll, spaces: Sequence[RowSpace], tokens: Tokens, first: Tensor, *, places: int, one: bool, most: int
) -> Texts:
    """One pursuit of texts that begin with the first tokens (n, 1)."""
    pool = _Pool(fed, spaces)
    pool.add(first)
    chosen: list[Tensor] = []
    while len(chosen) < most and pool.texts:
        best = pool.take(int(pool.shares().argmax()))
        chosen.append(best)
        if pool.explained():
            return Texts(_without_repeats(_leaves(_needed(fed, spaces, chosen))), PrefixStatus.GROWN)
        if one:
            pool.clear()
        if len(best) < places:
            pool.add(_longer([best], tokens(len(best))))
    return Texts(_leaves(chosen), PrefixStatus.STUCK)


def _needed(fed: FedAll, spaces: Sequence[RowSpace], chosen: list[Tensor]) -> list[Tensor]:
    """The beginnings that the rows of any layer need, and the beginnings of these."""
    needed = torch.zeros(len(chosen), dtype=torch.bool)
    each = [fed(text[None]) for text in chosen]
    fed_all = [torch.nn.functional.normalize(torch.cat(layer).double(), dim=1) for layer in zip(*each, strict=True)]
    for space, vectors in zip(spaces, fed_all, strict=True):
        needed |= needed_for(space, vectors)[0]
    kept = [tuple(text.tolist()) for text, yes in zip(chosen, needed.tolist(), strict=True) if yes]
    begun = {text[:length] for text in kept for length in range(1, len(text) + 1)}
    return [text for text in chosen if tuple(text.tolist()) in begun]


class _Pool:
    """Beginnings of texts that may come next, what all layers are fed of them, and what was taken so far."""

    def __init__(self, fed: FedAll, spaces: Sequence[RowSpace]) -> None:
        self.fed, self.spaces = fed, spaces
        self.texts: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.taken = [torch.zeros(0, space.basis.shape[1], dtype=torch.float64) for space in spaces]

    def add(self, texts: Tensor) -> None:
        vectors = [torch.nn.functional.normalize(each.double(), dim=1) for each in self.fed(texts)]
        vectors = [_outside(_outside(each, taken), taken) for each, taken in zip(vectors, self.taken, strict=True)]
        old = self.vectors or [each[:0] for each in vectors]
        self.vectors = [torch.cat(pair) for pair in zip(old, vectors, strict=True)]
        self.texts += list(texts)

    def clear(self) -> None:
        self.texts, self.vectors = [], []

    def shares(self) -> Tensor:
        """The part of each text's vectors, outside what was taken, that is in what is left of the row spaces."""
        total = torch.zeros(len(self.texts), dtype=torch.float64)
        for space, taken, vectors in zip(self.spaces, self.taken, self.vectors, strict=True):
            _, sizes, rest = torch.linalg.svd(_outside(space.basis, taken), full_matrices=False)
            rest = rest[sizes > DEVIATIONS * float(space.errors.max()) + LEAST_ERROR]
            total += (vectors @ rest.T).square().sum(1) / vectors.square().sum(1).clamp_min(LEAST_OPEN**2)
        return total

    def take(self, number: int) -> Tensor:
        """Take a text and its vectors out, and all others' parts along these."""
        for layer, vectors in enumerate(self.vectors):
            direction = torch.nn.functional.normalize(vectors[number], dim=0)
            self.taken[layer] = torch.cat([self.taken[layer], direction[None]])
            left = _outside(vectors, direction[None])
            self.vectors[layer] = torch.cat([left[:number], left[number + 1 :]])
        return self.texts.pop(number)

    def explained(self) -> bool:
        return all(
            bool(
                (_outside(space.basis, taken).norm(dim=1) <= DEVIATIONS * space.errors + LEAST_ERROR * len(taken)).all()
            )
            for space, taken in zip(self.spaces, self.taken, strict=True)
        )


def _outside(vectors: Tensor, directions: Tensor) -> Tensor:
    return vectors - vectors @ directions.T @ directions


def _longer(texts: list[Tensor], tokens: Tensor) -> Tensor:
    """Each text with each of the tokens behind it."""
    return torch.stack([torch.cat([text, token[None]]) for text in texts for token in tokens])


def _leaves(texts: list[Tensor]) -> list[Tensor]:
    """The texts that are not the beginning of another."""
    begun = {tuple(text[:-1].tolist()) for text in texts}
    return [text for text in texts if tuple(text.tolist()) not in begun]
