"""Recovered texts beside the private ones: words, whole texts, and planted secrets, with what guessing would get."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.evaluation.scoring import Match, match
from fedprism.metrics.texts import bleu, edit_distance, rouge, rouge_l
from fedprism.truth import Truth
from fedprism.types import Reconstruction

Decode = Callable[[Sequence[int]], str]
"""Tokens -> text, such as a tokenizer's `decode`."""

SECRETS = {
    "e-mail addresses": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "numbers": r"\d[\d\s/.,:-]*\d|\d",
}
"""Strings that are counted by themselves wherever they occur. Names are not told by a pattern: plant canaries."""


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """One private text and what was recovered of it. Shares and F-measures are from 0 to 1."""

    private: str
    recovered: str
    tokens: float
    """Share of the tokens that were recovered, wherever they are."""
    exact: bool
    rouge_1: float
    rouge_2: float
    rouge_l: float
    bleu: float
    edit_distance: int
    """Letters to be put in, taken out or replaced."""


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """Scores of all private texts; `secrets` says of each kind how many occurred and how many were recovered."""

    texts: tuple[TextScore, ...]
    secrets: dict[str, tuple[int, int]]
    """kind -> (recovered, occurred), each string counted once per text."""
    frequent: float
    """Share of the tokens in place that always guessing the batch's most frequent token would get."""

    @property
    def exact(self) -> float:
        """The share of texts that were recovered letter for letter."""
        return sum(text.exact for text in self.texts) / len(self.texts)

    def mean(self, name: str) -> float:
        """The mean of a score over all texts, those without an answer included."""
        return sum(float(getattr(text, name)) for text in self.texts) / len(self.texts)

    def __str__(self) -> str:
        names = ("tokens", "rouge_1", "rouge_2", "rouge_l", "bleu")
        lines = [f"{sum(text.exact for text in self.texts)} of {len(self.texts)} texts exact"]
        lines += [f"{name.replace('_', '-')} {self.mean(name):.3f}" for name in names]
        lines += [f"edit distance {self.mean('edit_distance'):.1f} letters per text"]
        lines += [f"{kind}: {found} of {all_} recovered" for kind, (found, all_) in self.secrets.items()]
        lines += [f"the most frequent token alone: {self.frequent:.3f} of the tokens"]
        return "\n".join(lines)


def score_texts(
    reconstruction: Reconstruction,
    truth: Truth,
    decode: Decode | None = None,
    *,
    padding: int = 0,
    canaries: Sequence[str] = (),
    matched: Match | None = None,
) -> TextScores:
    """Compare recovered texts with the private ones.

    `decode` turns tokens into text; without it a token's number is its word. `padding` is the token behind the end of a
    text. `canaries` are strings that were planted, counted by themselves beside e-mail addresses and numbers.
    """
    matched = matched or match(reconstruction, truth)
    if matched.tokens is None:
        raise BadInput("these inputs hold no texts as whole numbers. Score numbers with fp.score.")
    shown = decode or _numbers
    recovered, private = ([_without_padding(row, padding) for row in each] for each in matched.tokens)
    recovered = [row if number is not None else [] for row, number in zip(recovered, matched.rows, strict=True)]
    pairs = [(shown(ours), shown(theirs)) for ours, theirs in zip(recovered, private, strict=True)]
    texts = tuple(_scored(ours, theirs, *pair) for ours, theirs, pair in zip(recovered, private, pairs, strict=True))
    return TextScores(texts=texts, secrets=_secrets(pairs, canaries), frequent=_most_frequent(private))


def _scored(recovered: list[int], private: list[int], text: str, original: str) -> TextScore:
    words, true = text.split(), original.split()
    shared = (Counter(recovered) & Counter(private)).total()
    return TextScore(
        private=original,
        recovered=text,
        tokens=shared / len(private) if private else 1.0,
        exact=recovered == private,
        rouge_1=rouge(words, true, 1),
        rouge_2=rouge(words, true, 2),
        rouge_l=rouge_l(words, true),
        bleu=bleu(words, true),
        edit_distance=edit_distance(text, original),
    )


def _secrets(pairs: Sequence[tuple[str, str]], canaries: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Of each kind, how many strings of private texts are in the text recovered for them, and how many there are."""
    kinds: dict[str, list[tuple[str, str]]] = {kind: [] for kind in ("canaries", *SECRETS)}
    for recovered, private in pairs:
        kinds["canaries"] += [(canary, recovered) for canary in dict.fromkeys(canaries) if canary in private]
        for kind, pattern in SECRETS.items():
            kinds[kind] += [(string, recovered) for string in dict.fromkeys(re.findall(pattern, private))]
    return {kind: (sum(s in text for s, text in found), len(found)) for kind, found in kinds.items() if found}


def _most_frequent(private: Sequence[Sequence[int]]) -> float:
    counts = Counter(token for text in private for token in text)
    return max(counts.values(), default=0) / max(1, counts.total())


def _without_padding(row: Tensor, padding: int) -> list[int]:
    """The tokens up to the padding at the end; negative numbers are places without an answer."""
    kept = (row != padding).nonzero()
    end = int(kept[-1]) + 1 if len(kept) else 0
    return [token for token in torch.as_tensor(row[:end]).tolist() if token >= 0]


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
