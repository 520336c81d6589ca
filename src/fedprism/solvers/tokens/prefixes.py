"""Texts out of the row spaces of layers that see a token together with those before it: grown token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.tokens.span import DEVIATIONS, LEAST_ERROR, RowSpace, in_span

Fed = Callable[[int, Tensor], Tensor]
"""(number of a layer, texts (n, t)) -> what that layer is fed at the last token of each text, (n, width)."""
Tokens = Callable[[int], Tensor]
"""The tokens that may stand at a place."""


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


def pursue_text(fed: Fed, spaces: Sequence[RowSpace], tokens: Tokens, *, places: int) -> Texts:
    """The one text whose beginnings explain the rows of all layers, though these have fewer rows than it has tokens.

    The token whose beginning of the text fills most of what is left of the row spaces, all layers together, comes next.
    """
    text = torch.zeros(1, 0, dtype=torch.long)
    taken = [torch.zeros(0, space.basis.shape[1], dtype=torch.float64) for space in spaces]
    for place in range(places):
        fitting = tokens(place)
        longer = torch.cat([text.expand(len(fitting), -1), fitting[:, None]], dim=1)
        total, outside = torch.zeros(len(fitting), dtype=torch.float64), list[Tensor]()
        for number, space in enumerate(spaces):
            unit = torch.nn.functional.normalize(fed(number, longer).double(), dim=1)
            unit = unit - unit @ taken[number].T @ taken[number]
            rest = space.basis - space.basis @ taken[number].T @ taken[number]
            _, sizes, rest = torch.linalg.svd(rest, full_matrices=False)
            rest = rest[sizes > DEVIATIONS * float(space.errors.max()) + LEAST_ERROR]
            total += (unit @ rest.T).square().sum(1) / unit.square().sum(1).clamp_min(LEAST_ERROR)
            outside.append(unit)
        best = int(total.argmax())
        text = longer[best : best + 1]
        taken = [
            torch.cat([before, torch.nn.functional.normalize(unit[best], dim=0)[None]])
            for before, unit in zip(taken, outside, strict=True)
        ]
        if all(_explained(space, directions) for space, directions in zip(spaces, taken, strict=True)):
            return Texts([text[0]], PrefixStatus.GROWN)
    return Texts([text[0]], PrefixStatus.STUCK)


def _explained(space: RowSpace, taken: Tensor) -> bool:
    missed = (space.basis - space.basis @ taken.T @ taken).norm(dim=1)
    return bool((missed <= DEVIATIONS * space.errors + len(taken) ** 0.5 * LEAST_ERROR).all())
