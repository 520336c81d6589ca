"""Figure 6: how long it takes to recover all users' participation, by the number of users."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import mean, median

import torch

from fedprism import devices, solvers
from fedprism.randomness import generator
from fedprism.recipes import planted_participation as planted
from fedprism.recipes.base import Announce, Outcome, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart

USERS, QUICK_USERS = (64, 128, 256, 512, 1024), (64, 128)
ROUNDS_A_USER = 2
PARAMETERS, QUICK_PARAMETERS = 10_000, 1_000
TRIALS = 3
PROGRAMS, QUICK_PROGRAMS = 3, 1
"""Users whose integer program is solved; the time for all users is extrapolated from them."""
PROGRAM_LIMIT, QUICK_PROGRAM_LIMIT = 60.0, 5.0
FACTOR = "time factor"

FOUND, PROVED, PROGRAM = "ours", "ours with proofs", "integer programs"

PROGRAMS_SAID = (
    f"Integer programs: one a user, HiGHS, one thread, {PROGRAM_LIMIT:g} s at most. {PROGRAMS} were run (quick: "
    f"{QUICK_PROGRAMS}, {QUICK_PROGRAM_LIMIT:g} s) and their time multiplied up to all users; where some were "
    "stopped, the true time is longer. The time factor is against ours without proofs."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    warm = planted.Federation(users=16, rounds=48)
    _recover(planted.plant(warm, generator(0), devices.pick(settings.device)), prove=True)
    for users in settings.sizes_or(USERS, QUICK_USERS):
        federation = planted.Federation(
            users=users,
            rounds=ROUNDS_A_USER * users,
            parameters=QUICK_PARAMETERS if settings.quick else PARAMETERS,
        )
        yield Row(
            cell={"users": users, "rounds": federation.rounds, "parameters": federation.parameters or 0},
            entries=_entries(federation, settings, announce),
        )


def _entries(federation: planted.Federation, settings: Settings, announce: Announce) -> dict[str, Outcome]:
    trials = [
        planted.plant(federation, generator(settings.seed, "time", federation, trial), devices.pick(settings.device))
        for trial in range(settings.batches_or(TRIALS))
    ]
    ours = {}
    for name, prove in ((FOUND, False), (PROVED, True)):
        announce(f"{federation.users} users, {name}")
        ours[name] = _outcome([_recover(trial, prove=prove) for trial in trials], trials, proving=prove)
    programs, limit = (QUICK_PROGRAMS, QUICK_PROGRAM_LIMIT) if settings.quick else (PROGRAMS, PROGRAM_LIMIT)
    each = []
    for user in range(programs):
        announce(f"{federation.users} users, integer program {user + 1} of {programs}")
        each.append(planted.program_seconds(trials[0], user, limit))
    seconds = federation.users * mean(each)
    factor = seconds / median(ours[FOUND].seconds)
    capped = sum(spent >= limit for spent in each)
    return {
        **ours,
        PROGRAM: Outcome(
            values={FACTOR: (factor,)},
            seconds=(seconds,),
            statuses=(f"{capped} of {programs} programs were stopped after {limit:g} s",),
        ),
    }


def _recover(trial: planted.Planted, *, prove: bool) -> tuple[solvers.Participation, float]:
    start = _now(trial.sums.device)
    found = solvers.recover_participation(
        trial.sums,
        trial.windows,
        trial.counts,
        users=trial.matrix.shape[1],
        certify=prove,
        time_limit=0.0,
    )
    return found, _now(trial.sums.device) - start


def _outcome(
    found: Sequence[tuple[solvers.Participation, float]], trials: Sequence[planted.Planted], *, proving: bool
) -> Outcome:
    right = [(answer.matrix.cpu() == trial.matrix).all(0) for (answer, _), trial in zip(found, trials, strict=True)]
    certified = [answer.certified.cpu() for answer, _ in found]
    values = {planted.EXACT: tuple(float(columns.all()) for columns in right)}
    if proving:
        values[planted.CERTIFIED] = tuple(float(proved.float().mean()) for proved in certified)
        values[planted.WRONG] = tuple(
            float((proved & ~columns).float().mean()) for proved, columns in zip(certified, right, strict=True)
        )
    return Outcome(
        values=values,
        seconds=tuple(seconds for _, seconds in found),
        statuses=tuple(answer.status.value for answer, _ in found),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def figure(rows: Sequence[Row]) -> str:
    """Seconds by the number of users, both on logarithmic scales."""
    curves = {
        name: [
            (float(row.cell["users"]), entry.seconds_a_batch)
            for row in rows
            if isinstance(entry := row.entries[name], Outcome)
        ]
        for name in (FOUND, PROVED, PROGRAM)
    }
    return line_chart(curves, x="users", y="seconds", log_x=True, log_y=True)


RECIPE = Recipe(
    name="disaggregation-fig-6",
    summary="Time to recover all users' participation (two rounds a user, participation .1, windows of 10)",
    citation=f"{planted.CITATION}, figure 6",
    shown=(planted.EXACT, planted.CERTIFIED, planted.WRONG, FACTOR),
    run=run,
    figure=figure,
    notes=(
        planted.PLANTED,
        planted.FIGURES_ONLY,
        "Proofs are by duality alone.",
        PROGRAMS_SAID,
    ),
)
