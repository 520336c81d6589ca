"""Figure 2: how many rounds it takes to recover all users' participation, by the number of users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedprism.recipes import planted_participation as planted
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart

USERS, QUICK_USERS = (16, 32, 64, 128, 256, 512, 1024), (32, 64)
ROUNDS_A_USER, QUICK_ROUNDS_A_USER = (1.5, 1.75, 2.0, 3.0), (1.5, 2.0)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for users in settings.sizes_or(USERS, QUICK_USERS):
        for factor in QUICK_ROUNDS_A_USER if settings.quick else ROUNDS_A_USER:
            federation = planted.Federation(users=users, rounds=round(factor * users))
            yield Row(
                cell={"users": users, "rounds": federation.rounds, "rounds a user": factor},
                entries={"ours": planted.measure(federation, settings, announce)},
            )


def figure(rows: Sequence[Row]) -> str:
    return line_chart(planted.curves(rows, "users", "rounds a user", "users"), x="rounds a user", y=planted.COLUMNS)


RECIPE = Recipe(
    name="disaggregation-fig-2",
    summary="Participation recovered exactly, by the number of users and rounds (participation .1, windows of 10)",
    citation=f"{planted.CITATION}, figure 2",
    shown=(planted.EXACT, planted.COLUMNS, planted.CERTIFIED, planted.WRONG),
    run=run,
    figure=figure,
    notes=(
        planted.PLANTED,
        planted.FIGURES_ONLY,
        "With few users several columns may keep a user's counts and explain the sums: those users are ambiguous.",
    ),
)
