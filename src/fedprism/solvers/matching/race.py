"""Several random starts that share the iterations of one run: a bad start shows early by its objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Start = TypeVar("Start")
Run = TypeVar("Run")


def race(
    run: Callable[[Start, int, int], Run],
    starts: Iterable[Start],
    *,
    iterations: int,
    heat: int,
    best: Callable[[Sequence[Run]], Run],
    resume: Callable[[Run], Start],
) -> list[Run]:
    """Run every start for `heat` iterations, then resume the best run for those that are left of `iterations`.

    run(start, iterations, done): `done` iterations were run before it. With a heat of 0 every start has all iterations.
    """
    length, runs = heat or iterations, list[Run]()
    for start in starts:
        runs.append(run(start, length, length * len(runs)))
    if heat:
        done = heat * len(runs)
        runs.append(run(resume(best(runs)), iterations - done, done))
    return runs
