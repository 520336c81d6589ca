"""Figure 5: how long updates must be for participation to be recovered under noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedprism.recipes import planted_participation as planted
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart

USERS, QUICK_USERS = (100,), (40,)
PARAMETERS, QUICK_PARAMETERS = (1_000, 3_000, 10_000, 30_000, 100_000), (1_000,)
NOISES, QUICK_NOISES = (0.1, 0.3, 1.0, 3.0), (0.1, 1.0)
TRIALS = 5


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for users in settings.sizes_or(USERS, QUICK_USERS):
        for noise in QUICK_NOISES if settings.quick else NOISES:
            for parameters in QUICK_PARAMETERS if settings.quick else PARAMETERS:
                federation = planted.Federation(users=users, rounds=2 * users, parameters=parameters, noise=noise)
                yield Row(
                    cell={"users": users, "noise": noise, "parameters": parameters},
                    entries={
                        "cohorts known": planted.measure(
                            federation, settings, announce, know_cohorts=True, trials=TRIALS
                        ),
                        "cohorts unknown": planted.measure(federation, settings, announce, trials=TRIALS),
                    },
                )


def figure(rows: Sequence[Row]) -> str:
    curves = planted.curves(rows, "noise", "parameters", "noise", method="cohorts known")
    return line_chart(curves, x="parameters", y=planted.COLUMNS, log_x=True)


RECIPE = Recipe(
    name="disaggregation-fig-5",
    summary="Participation recovered under noise, by its strength and the number of parameters (100 users, 200 rounds)",
    citation=f"{planted.CITATION}, figure 5",
    shown=(planted.EXACT, planted.COLUMNS, planted.ENTRIES),
    run=run,
    figure=figure,
    notes=(
        planted.PLANTED,
        "Noise: standard deviation of what every user adds to every entry in every round; the updates' is 1.",
        "Rounds are weighted by their noise: from the cohort sizes where known, else from what the signal leaves over.",
        "Under such noise no column can be proved to be the only one.",
    ),
)
