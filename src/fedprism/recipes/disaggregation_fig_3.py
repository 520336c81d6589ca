"""Figure 3: how many rounds it takes when users take part more often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedprism.recipes import planted_participation as planted
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart

USERS, QUICK_USERS = (100,), (40,)
ROUNDS = {0.1: (160, 180, 200), 0.2: (200, 220, 240), 0.3: (220, 260, 300, 340), 0.5: (260, 300, 340)}
QUICK_ROUNDS = {0.1: (100,), 0.3: (120,)}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for users in settings.sizes_or(USERS, QUICK_USERS):
        for rate, all_rounds in (QUICK_ROUNDS if settings.quick else ROUNDS).items():
            for rounds in all_rounds:
                federation = planted.Federation(users=users, rounds=rounds, rate=rate)
                yield Row(
                    cell={"users": users, "participation": rate, "rounds": rounds},
                    entries={"ours": planted.measure(federation, settings, announce)},
                )


def figure(rows: Sequence[Row]) -> str:
    return line_chart(planted.curves(rows, "participation", "rounds", "participation"), x="rounds", y=planted.COLUMNS)


RECIPE = Recipe(
    name="disaggregation-fig-3",
    summary="Participation recovered exactly, by how often users take part and rounds (100 users, windows of 10)",
    citation=f"{planted.CITATION}, figure 3",
    shown=(planted.EXACT, planted.COLUMNS, planted.CERTIFIED, planted.WRONG),
    run=run,
    figure=figure,
    notes=(planted.PLANTED, planted.FIGURES_ONLY),
)
