"""The race of starts on a problem whose winner is known: runs count down from their start."""

from __future__ import annotations

import pytest

from fedprism.solvers.matching.race import race


@pytest.mark.parametrize(
    ("heat", "calls"),
    [
        (0, [(9, 10, 0), (4, 10, 10), (7, 10, 20)]),
        (2, [(9, 2, 0), (4, 2, 2), (7, 2, 4), (2, 4, 6)]),
    ],
    ids=["all run to the end", "the best one goes on"],
)
def test_the_best_start_gets_what_the_others_leave(heat: int, calls: list[tuple[int, int, int]]) -> None:
    seen = list[tuple[int, int, int]]()

    def run(start: int, iterations: int, done: int) -> int:
        seen.append((start, iterations, done))
        return start - iterations

    runs = race(run, iter([9, 4, 7]), iterations=10, heat=heat, best=min, resume=lambda end: end)
    assert seen == calls
    assert runs == [start - iterations for start, iterations, _ in calls]
