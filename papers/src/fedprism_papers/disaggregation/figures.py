"""Figures 2, 4, 5 and 6: how much of all users' participation comes back, by users, rate, window and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.disaggregation.algorithm_1 import ALGORITHM_1, ALGORITHM_1_SAID, measure
from fedprism_papers.disaggregation.planted_participation import Federation
from fedprism_papers.disaggregation.times import SECONDS_SAID, draw_seconds
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.charts import line_chart

Line = tuple[dict[str, str | int | float], Federation]
"""A row's cell and its federation."""


def by_users(users: int, quick: bool) -> Iterator[Line]:
    for factor in (1.5, 2.0) if quick else (1.5, 1.75, 2.0, 3.0):
        rounds = round(factor * users)
        yield {"users": users, "rounds": rounds, "rounds a user": factor}, Federation(users=users, rounds=rounds)


def by_rate(users: int, quick: bool) -> Iterator[Line]:
    full = {
        0.1: (1.6, 1.8, 2.0),
        0.2: (2.0, 2.2, 2.4),
        0.3: (2.6, 3.0, 3.4),
        0.4: (2.6, 3.0, 3.4),
        0.5: (2.6, 3.0, 3.4),
    }
    for rate, factors in ({0.1: (2.5,), 0.3: (3.0,)} if quick else full).items():
        for rounds in (round(factor * users) for factor in factors):
            federation = Federation(users=users, rounds=rounds, rate=rate)
            yield {"users": users, "participation": rate, "rounds": rounds}, federation


def by_window(users: int, quick: bool) -> Iterator[Line]:
    full = {10: (1.6, 1.8, 2.0), 20: (2.4, 2.8, 3.4), 30: (2.8, 3.4, 4.0), 40: (3.4, 4.0, 5.5), 50: (4.0, 5.5, 7.0)}
    for window, factors in ({10: (2.5,), 20: (3.5,)} if quick else full).items():
        for rounds in (round(factor * users) for factor in factors):
            federation = Federation(users=users, rounds=rounds, window=window)
            yield {"users": users, "window": window, "rounds": rounds}, federation


def by_noise(users: int, quick: bool) -> Iterator[Line]:
    for noise in (0.1, 1.0) if quick else (0.1, 0.3, 1.0, 3.0):
        for parameters in (1_000,) if quick else (1_000, 3_000, 10_000, 30_000, 100_000):
            federation = Federation(users=users, rounds=2 * users, parameters=parameters, noise=noise)
            yield {"users": users, "noise": noise, "parameters": parameters}, federation


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One panel of a figure: a curve for each value of the column `curve`, along the column `along`.

    `timed` draws the least, the mean and the most seconds of the trials instead of the fraction of right columns;
    `algorithm_1` runs the paper's own algorithm on the same sums.
    """

    number: str
    summary: str
    lines: Callable[[int, bool], Iterator[Line]]
    curve: str
    along: str
    notes: tuple[str, ...]
    users: tuple[int, ...] = (100,)
    quick_users: tuple[int, ...] = (40,)
    methods: Mapping[str, bool]
    """The columns, and whether the sizes of the cohorts are known in each."""
    trials: int = planted.TRIALS
    timed: bool = False
    algorithm_1: bool = False
    shown: tuple[str, ...] = (planted.EXACT, planted.COLUMNS, planted.CERTIFIED, planted.WRONG)

    def run(self, settings: Settings, announce: Announce) -> Iterator[Row]:
        for users in settings.sizes_or(self.users, self.quick_users):
            for cell, federation in self.lines(users, settings.quick):
                entries = {
                    name: planted.measure(federation, settings, announce, know_cohorts=known, trials=self.trials)
                    for name, known in self.methods.items()
                }
                if self.algorithm_1:
                    entries[ALGORITHM_1] = measure(federation, settings, announce)
                yield Row(cell=cell, entries=entries)

    def draw(self, rows: Sequence[Row]) -> str:
        if self.timed:
            return draw_seconds(rows, self.curve, self.along, tuple(self.methods))
        curves = planted.curves(rows, self.curve, self.along, next(iter(self.methods)))
        return line_chart(curves, x=self.along, y=planted.COLUMNS, log_x=self.along == "parameters")

    def recipe(self) -> Recipe:
        return Recipe(
            name=f"disaggregation-fig-{self.number}",
            summary=self.summary,
            citation=f"{planted.CITATION}, figure {self.number.replace('-', '')}",
            shown=self.shown,
            run=self.run,
            figure=self.draw,
            notes=(planted.PLANTED, *self.notes, *((ALGORITHM_1_SAID,) if self.algorithm_1 else ())),
        )


OURS = {"ours": False}
SEVERAL = (50, 100, 200)
"""Users of the figures that the paper repeats for several numbers of them."""
FIGURES = (
    Figure(
        number="2",
        summary="Participation recovered exactly, by the number of users and rounds (participation .1, windows of 10)",
        lines=by_users,
        curve="users",
        along="rounds a user",
        users=(16, 32, 64, 128, 256, 512, 1024),
        quick_users=(32, 64),
        methods=OURS,
        algorithm_1=True,
        notes=(
            planted.FIGURES_ONLY,
            "With few users several columns may keep a user's counts and explain the sums: those users are ambiguous.",
        ),
    ),
    Figure(
        number="4",
        summary="Participation recovered exactly, by how often users take part and rounds (windows of 10)",
        users=SEVERAL,
        lines=by_rate,
        curve="participation",
        along="rounds",
        methods=OURS,
        notes=(planted.FIGURES_ONLY,),
    ),
    Figure(
        number="5",
        summary="Participation recovered exactly, by the length of the counted windows and rounds (participation .1)",
        users=SEVERAL,
        lines=by_window,
        curve="window",
        along="rounds",
        methods=OURS,
        notes=(planted.FIGURES_ONLY,),
    ),
    Figure(
        number="6",
        summary="Participation recovered under noise, by its strength and number of parameters (100 users, 200 rounds)",
        lines=by_noise,
        curve="noise",
        along="parameters",
        methods={"cohorts known": True, "cohorts unknown": False},
        trials=5,
        algorithm_1=True,
        shown=(planted.EXACT, planted.COLUMNS, planted.ENTRIES),
        notes=(
            "Noise: standard deviation of what every user adds to every entry in every round; the updates' is 1.",
            "Rounds are weighted by their noise: from cohort sizes where known, else from what the signal leaves over.",
            "Under such noise no column can be proved to be the only one.",
        ),
    ),
    Figure(
        number="4-b",
        summary="Seconds to recover all columns, by how often users take part and rounds (100 users, windows of 10)",
        lines=by_rate,
        curve="participation",
        along="rounds",
        methods=OURS,
        timed=True,
        notes=(planted.FIGURES_ONLY, SECONDS_SAID),
    ),
)
FIG_2, FIG_4, FIG_5, FIG_6, FIG_4_B = (figure.recipe() for figure in FIGURES)
