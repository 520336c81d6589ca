"""How close a recovered text is to the private one, in the measures that people who work with texts know.

ROUGE-1, ROUGE-2 and ROUGE-L as F-measures (Lin, "ROUGE: a package for automatic evaluation of summaries", 2004), BLEU
with four-grams (Papineni et al., 2002), Levenshtein's edit distance. All take lists of words, or of tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeAlias

Words: TypeAlias = Sequence[Hashable]

MOST_GRAM = 4
"""Longest word sequences that BLEU counts, as in the paper."""


def rouge(recovered: Words, private: Words, length: int) -> float:
    """ROUGE-N: how many sequences of `length` words the texts share, as an F-measure from 0 to 1."""
    first, second = _grams(recovered, length), _grams(private, length)
    return _f_measure((first & second).total(), first.total(), second.total())


def rouge_l(recovered: Words, private: Words) -> float:
    """ROUGE-L: the longest common subsequence, as an F-measure from 0 to 1."""
    before = [0] * (len(private) + 1)
    for word in recovered:
        row = [0]
        for place, other in enumerate(private):
            row.append(before[place] + 1 if word == other else max(before[place + 1], row[place]))
        before = row
    return _f_measure(before[-1], len(recovered), len(private))


def bleu(recovered: Words, private: Words) -> float:
    """BLEU of one text with sequences of up to four words, from 0 to 1; shorter texts are judged by shorter ones."""
    most = min(MOST_GRAM, len(recovered), len(private))
    if not most:
        return float(not recovered and not private)
    logarithms = []
    for length in range(1, most + 1):
        ours, theirs = _grams(recovered, length), _grams(private, length)
        shared = (ours & theirs).total()
        if not shared:
            return 0.0
        logarithms.append(math.log(shared / ours.total()))
    brevity = min(0.0, 1 - len(private) / len(recovered))
    return math.exp(brevity + sum(logarithms) / most)


def edit_distance(recovered: Sequence[Hashable] | str, private: Sequence[Hashable] | str) -> int:
    """How many words (or letters) have to be put in, taken out or replaced."""
    before = list(range(len(private) + 1))
    for number, word in enumerate(recovered, 1):
        row = [number]
        for place, other in enumerate(private):
            row.append(min(before[place] + (word != other), before[place + 1] + 1, row[place] + 1))
        before = row
    return before[-1]


def _grams(words: Words, length: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _f_measure(shared: int, recovered: int, private: int) -> float:
    return 2 * shared / (recovered + private) if recovered + private else 1.0
