"""Figure 4: how many rounds it takes when participation is counted in longer windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedprism.recipes import planted_participation as planted
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart

USERS, QUICK_USERS = (100,), (40,)
ROUNDS = {10: (160, 180, 200), 20: (240, 280, 340), 30: (280, 340, 400), 50: (400, 550, 700)}
QUICK_ROUNDS = {10: (100,), 20: (140,)}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for users in settings.sizes_or(USERS, QUICK_USERS):
        for window, all_rounds in (QUICK_ROUNDS if settings.quick else ROUNDS).items():
            for rounds in all_rounds:
                federation = planted.Federation(users=users, rounds=rounds, window=window)
                yield Row(
                    cell={"users": users, "window": window, "rounds": rounds},
                    entries={"ours": planted.measure(federation, settings, announce)},
                )


def figure(rows: Sequence[Row]) -> str:
    return line_chart(planted.curves(rows, "window", "rounds", "window"), x="rounds", y=planted.COLUMNS)


RECIPE = Recipe(
    name="disaggregation-fig-4",
    summary="Participation recovered exactly, by the length of the counted windows and rounds (100 users, rate .1)",
    citation=f"{planted.CITATION}, figure 4",
    shown=(planted.EXACT, planted.COLUMNS, planted.CERTIFIED, planted.WRONG),
    run=run,
    figure=figure,
    notes=(planted.PLANTED, planted.FIGURES_ONLY),
)
