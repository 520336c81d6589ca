"""A reconstruction beside the truth, for people. It looks at the truth, which attacks must not reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fedprism.display import html
from fedprism.evaluation.scoring import Match, Scores, match, score
from fedprism.evaluation.severity import NOT_LEAKAGE, number
from fedprism.truth import Truth
from fedprism.types import Reconstruction


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """What was recovered beside what was private, in the order of the truth. A notebook shows it with pictures."""

    matched: Match
    scores: Scores

    def __repr__(self) -> str:
        return f"Comparison({self.scores!r})"

    def __str__(self) -> str:
        return str(self.scores)

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Callable[[int], object]]] = []
        for what, recovered, private in self._parts():
            rows.append((f"private{what}", partial(html.sample, private, name="private")))
            rows.append((f"recovered{what}", partial(self._answer, recovered)))
        values = self.scores.values
        for name in values:
            if name != NOT_LEAKAGE:
                rows.append((name, partial(_score, name, values[name])))
        return html.lines([html.samples(len(self.matched.rows), rows), *map(html.paragraph, self.scores.notes)])

    def _parts(self) -> list[tuple[str, Tensor, Tensor]]:
        """Numbers and whole numbers, each as a name, what was recovered and what was private."""
        matched = self.matched
        numbers = [("", matched.recovered, matched.truth)] if matched.truth[:1].numel() else []
        return [*numbers, *([(" whole numbers", *matched.tokens)] if matched.tokens is not None else [])]

    def _answer(self, recovered: Tensor, place: int) -> object:
        return "no answer" if self.matched.rows[place] is None else html.sample(recovered, place, "recovered")


def show(reconstruction: Reconstruction, truth: Truth) -> Comparison:
    """Put a reconstruction beside the truth, aligned as `score` aligns the two; a notebook shows it as pictures."""
    matched = match(reconstruction, truth)
    return Comparison(matched=matched, scores=score(reconstruction, truth, matched=matched))


def _score(metric: str, values: tuple[float | None, ...], place: int) -> str:
    return number(metric, values[place])
