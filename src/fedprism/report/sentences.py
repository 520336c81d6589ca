"""Texts in a report: tokens as words where the audit knows them, and those in their places marked."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup
from torch import Tensor

MOST_PLACES = 64
"""Tokens of a text that are shown."""


def sentence(tokens: Tensor, other: Tensor | None, words: Mapping[int, str]) -> Markup:
    """A text; tokens that the other text has in the same place are marked. Without words, tokens are their numbers."""
    numbers = tokens[:MOST_PLACES].tolist()
    beside = [None] * len(numbers) if other is None else other[:MOST_PLACES].tolist()
    pieces = []
    for token, same in zip(numbers, beside, strict=False):
        word = words.get(token, f" <{token}>") if words else f" {token}"
        pieces.append(Markup('<span class="right">{}</span>').format(word) if token == same else Markup.escape(word))
    return Markup("").join([*pieces, " …" if len(tokens) > MOST_PLACES else ""])
