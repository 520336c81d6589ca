"""Figures 2 to 6: how much of all users' participation comes back, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.disaggregation.planted_participation import Federation
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings, curve
from fedprism_papers.shared.charts import line_chart

Line = tuple[dict[str, str | int | float], Federation]
"""A row's cell and its federation."""


def by_users(users: int, quick: bool) -> Iterator[Line]:
    for factor in (1.5, 2.0) if quick else (1.5, 1.75, 2.0, 3.0):
        rounds = round(factor * users)
        yield {"users": users, "rounds": rounds, "rounds a user": factor}, Federation(users=users, rounds=rounds)


def by_rate(users: int, quick: bool) -> Iterator[Line]:
    full = {0.1: (160, 180, 200), 0.2: (200, 220, 240), 0.3: (220, 260, 300, 340), 0.5: (260, 300, 340)}
    for rate, lengths in ({0.1: (100,), 0.3: (120,)} if quick else full).items():
        for rounds in lengths:
            federation = Federation(users=users, rounds=rounds, rate=rate)
            yield {"users": users, "participation": rate, "rounds": rounds}, federation


def by_window(users: int, quick: bool) -> Iterator[Line]:
    full = {10: (160, 180, 200), 20: (240, 280, 340), 30: (280, 340, 400), 50: (400, 550, 700)}
    for window, lengths in ({10: (100,), 20: (140,)} if quick else full).items():
        for rounds in lengths:
            federation = Federation(users=users, rounds=rounds, window=window)
            yield {"users": users, "window": window, "rounds": rounds}, federation


def by_noise(users: int, quick: bool) -> Iterator[Line]:
    for noise in (0.1, 1.0) if quick else (0.1, 0.3, 1.0, 3.0):
        for parameters in (1_000,) if quick else (1_000, 3_000, 10_000, 30_000, 100_000):
            federation = Federation(users=users, rounds=2 * users, parameters=parameters, noise=noise)
            yield {"users": users, "noise": noise, "parameters": parameters}, federation


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the paper: a curve for each value of the column `curve`, along the column `along`."""

    number: int
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
    shown: tuple[str, ...] = (planted.EXACT, planted.COLUMNS, planted.CERTIFIED, planted.WRONG)

    def run(self, settings: Settings, announce: Announce) -> Iterator[Row]:
        for users in settings.sizes_or(self.users, self.quick_users):
            for cell, federation in self.lines(users, settings.quick):
                entries = {
                    name: planted.measure(federation, settings, announce, know_cohorts=known, trials=self.trials)
                    for name, known in self.methods.items()
                }
                yield Row(cell=cell, entries=entries)

    def draw(self, rows: Sequence[Row]) -> str:
        curves = planted.curves(rows, self.curve, self.along, next(iter(self.methods)))
        return line_chart(curves, x=self.along, y=planted.COLUMNS, log_x=self.along == "parameters")

    def recipe(self) -> Recipe:
        return Recipe(
            name=f"disaggregation-fig-{self.number}",
            summary=self.summary,
            citation=f"{planted.CITATION}, figure {self.number}",
            shown=self.shown,
            run=self.run,
            figure=self.draw,
            notes=(planted.PLANTED, *self.notes),
        )


OURS = {"ours": False}
FIGURES = (
    Figure(
        number=2,
        summary="Participation recovered exactly, by the number of users and rounds (participation .1, windows of 10)",
        lines=by_users,
        curve="users",
        along="rounds a user",
        users=(16, 32, 64, 128, 256, 512, 1024),
        quick_users=(32, 64),
        methods=OURS,
        notes=(
            planted.FIGURES_ONLY,
            "With few users several columns may keep a user's counts and explain the sums: those users are ambiguous.",
        ),
    ),
    Figure(
        number=3,
        summary="Participation recovered exactly, by how often users take part and rounds (100 users, windows of 10)",
        lines=by_rate,
        curve="participation",
        along="rounds",
        methods=OURS,
        notes=(planted.FIGURES_ONLY,),
    ),
    Figure(
        number=4,
        summary="Participation recovered exactly, by the length of the counted windows and rounds (100 users, rate .1)",
        lines=by_window,
        curve="window",
        along="rounds",
        methods=OURS,
        notes=(planted.FIGURES_ONLY,),
    ),
    Figure(
        number=5,
        summary="Participation recovered under noise, by its strength and number of parameters (100 users, 200 rounds)",
        lines=by_noise,
        curve="noise",
        along="parameters",
        methods={"cohorts known": True, "cohorts unknown": False},
        trials=5,
        shown=(planted.EXACT, planted.COLUMNS, planted.ENTRIES),
        notes=(
            "Noise: standard deviation of what every user adds to every entry in every round; the updates' is 1.",
            "Rounds are weighted by their noise: from cohort sizes where known, else from what the signal leaves over.",
            "Under such noise no column can be proved to be the only one.",
        ),
    ),
)
FIG_2, FIG_3, FIG_4, FIG_5 = (figure.recipe() for figure in FIGURES)

# --- figure 6: how long it takes, by the number of users -------------------------------------------------------------

USERS, QUICK_USERS = (64, 128, 256, 512, 1024), (64, 128)  # in a federation
ROUNDS_A_USER = 2  # rounds = this many times the users
PARAMETERS, QUICK_PARAMETERS = 10_000, 1_000  # of an update
TRIALS = 3  # per number of users
PROGRAMS, QUICK_PROGRAMS = 3, 1
"""Users whose integer program is solved; the time for all users is extrapolated from them."""
PROGRAM_LIMIT, QUICK_PROGRAM_LIMIT = 60.0, 5.0  # seconds for one integer program
FACTOR = "time factor"

RECOVERED, PROVED, PROGRAM = "ours", "ours with proofs", "integer programs"

PROGRAMS_SAID = (
    f"Integer programs: one a user, HiGHS, one thread, {PROGRAM_LIMIT:g} s at most. {PROGRAMS} were run (quick: "
    f"{QUICK_PROGRAMS}, {QUICK_PROGRAM_LIMIT:g} s) and their time multiplied up to all users; where some were "
    "stopped, the true time is longer. The time factor is against ours without proofs."
)


def figure_6(settings: Settings, announce: Announce) -> Iterator[Row]:
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
            seconds=(seconds,),
            statuses=(f"{capped} of {programs} programs were stopped after {limit:g} s",),
        ),
    }


def _recover(trial: planted.Planted, *, prove: bool) -> Measured:
    metrics = (planted.EXACT, *((planted.CERTIFIED, planted.WRONG) if prove else ()))
    return planted.recover(trial, metrics, certify=prove, time_limit=0.0)


def draw_times(rows: Sequence[Row]) -> str:
    """Seconds by the number of users, both on logarithmic scales."""
    curves = {
        name: curve(rows, "users", name, lambda entry: entry.seconds_a_batch) for name in (RECOVERED, PROVED, PROGRAM)
    }
    return line_chart(curves, x="users", y="seconds", log_x=True, log_y=True)


FIG_6 = Recipe(
    name="disaggregation-fig-6",
    summary="Time to recover all users' participation (two rounds a user, participation .1, windows of 10)",
    citation=f"{planted.CITATION}, figure 6",
    shown=(planted.EXACT, planted.CERTIFIED, planted.WRONG, FACTOR),
    run=figure_6,
    figure=draw_times,
    notes=(planted.PLANTED, planted.FIGURES_ONLY, "Proofs are by duality alone.", PROGRAMS_SAID),
)
