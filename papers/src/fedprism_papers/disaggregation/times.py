"""Figure 3: how long it takes to recover all users' participation, by the number of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.disaggregation.planted_participation import Federation
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings, curve
from fedprism_papers.shared.charts import line_chart

USERS, QUICK_USERS = (64, 128, 256, 512, 1024), (64, 128)
ROUNDS_A_USER = 2
PARAMETERS, QUICK_PARAMETERS = 10_000, 1_000
TRIALS = 3
PROGRAMS, QUICK_PROGRAMS = 3, 1
"""Users whose integer program is solved; the time for all users is extrapolated from them."""
PROGRAM_LIMIT, QUICK_PROGRAM_LIMIT = 60.0, 5.0
FACTOR = "time factor"

RECOVERED, PROVED, PROGRAM = "ours", "ours with proofs", "integer programs"

SECONDS_SAID = "Seconds of wall time on the machine at hand: the least, the mean and the most of the trials."
PROGRAMS_SAID = (
    f"Integer programs: one a user, HiGHS, one thread, {PROGRAM_LIMIT:g} s at most. {PROGRAMS} were run (quick: "
    f"{QUICK_PROGRAMS}, {QUICK_PROGRAM_LIMIT:g} s) and their time multiplied up to all users; where some were "
    "stopped, the true time is longer. The time factor is against ours without proofs."
)


def figure_3(settings: Settings, announce: Announce) -> Iterator[Row]:
    warm = Federation(users=16, rounds=48)
    _recover(planted.plant(warm, generator(0), devices.pick(settings.device)), prove=True)
    for users in settings.sizes_or(USERS, QUICK_USERS):
        federation = Federation(
            users=users, rounds=ROUNDS_A_USER * users, parameters=QUICK_PARAMETERS if settings.quick else PARAMETERS
        )
        yield Row(
            cell={"users": users, "rounds": federation.rounds, "parameters": federation.parameters or 0},
            entries=_entries(federation, settings, announce),
        )


def _entries(federation: Federation, settings: Settings, announce: Announce) -> dict[str, Measured]:
    trials = [
        planted.plant(federation, generator(settings.seed, "time", federation, trial), devices.pick(settings.device))
        for trial in range(settings.batches_or(TRIALS))
    ]
    ours = {}
    for name, prove in ((RECOVERED, False), (PROVED, True)):
        announce(f"{federation.users} users, {name}")
        ours[name] = planted.merged([_recover(trial, prove=prove) for trial in trials])
    programs, limit = (QUICK_PROGRAMS, QUICK_PROGRAM_LIMIT) if settings.quick else (PROGRAMS, PROGRAM_LIMIT)
    each = []
    for user in range(programs):
        announce(f"{federation.users} users, integer program {user + 1} of {programs}")
        each.append(planted.program_seconds(trials[0], user, limit))
    seconds = federation.users * mean(each)
    factor = seconds / median(ours[RECOVERED].seconds)
    capped = sum(spent >= limit for spent in each)
    return {
        **ours,
        PROGRAM: Measured(
            values={FACTOR: (factor,)},
            seconds=tuple(federation.users * spent for spent in each),
            statuses=(f"{capped} of {programs} programs were stopped after {limit:g} s",),
        ),
    }


def _recover(trial: planted.Planted, *, prove: bool) -> Measured:
    metrics = (planted.EXACT, *((planted.CERTIFIED, planted.WRONG) if prove else ()))
    return planted.recover(trial, metrics, certify=prove, time_limit=0.0)


def draw_times(rows: Sequence[Row]) -> str:
    """Least, mean and most seconds by the number of users, on logarithmic scales."""
    return draw_seconds(rows, "", "users", (RECOVERED, PROVED, PROGRAM))


def draw_seconds(rows: Sequence[Row], split: str, along: str, methods: Sequence[str]) -> str:
    """Least, mean and most seconds of the trials along a column; curves for each value of the column `split`."""
    kinds: dict[str, Callable[[Measured], float]] = {
        "least": lambda entry: min(entry.seconds),
        "mean": lambda entry: entry.seconds_a_batch,
        "most": lambda entry: max(entry.seconds),
    }
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for method in methods:
            for kind, value in kinds.items():
                name = f"{split} {row.cell[split]}, {kind}" if split else f"{method}, {kind}"
                curves.setdefault(name, []).extend(curve([row], along, method, value))
    return line_chart(curves, x=along, y="seconds", log_x=not split, log_y=True)


FIG_3 = Recipe(
    name="disaggregation-fig-3",
    summary="Time to recover all users' participation (two rounds a user, participation .1, windows of 10)",
    citation=f"{planted.CITATION}, figure 3",
    shown=(planted.EXACT, planted.CERTIFIED, planted.WRONG, FACTOR),
    run=figure_3,
    figure=draw_times,
    notes=(planted.PLANTED, planted.FIGURES_ONLY, "Proofs are by duality alone.", SECONDS_SAID, PROGRAMS_SAID),
)
