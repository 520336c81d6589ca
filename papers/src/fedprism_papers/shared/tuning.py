"""Chooses an attack's hyper-parameters the way an attacker can: in a rehearsal on data of its own.

    def make(weights: Mapping[str, float]) -> Attack:
        return replace(inverting_gradients(), priors=(TotalVariation(weights["tv"]),))

    chosen = tune(make, {"tv": Range(1e-3, 0.5)}, rehearsal, threat, trials=20, seed=0)
    attack = make(chosen.values)

The attacker plays the client itself, with images of its own that are not the ones it is after, so it may compare what
came back with what it put in. Its objective could not choose between weights: each of them makes another objective.
Searching on the attacked batch by the truth, as published sweeps did, is what no attacker can do.

The search is Optuna's TPE (Bergstra et al., NeurIPS 2011) on a logarithmic scale; same seed, same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fedprism.attacks import Attack
from fedprism.checks import whole
from fedprism.errors import BadInput
from fedprism.experiments import Scoring, Setting, Trial, run_trial
from fedprism.runtime import progress
from fedprism.simulation.federation import simulate
from fedprism.simulation.scenario import Scenario
from fedprism.threats import ThreatModel

Weights: TypeAlias = Mapping[str, float]
MOST_TRIALS = 10_000
"""Rehearsals of one search: a bound on typing errors, ours."""


class Range(NamedTuple):
    """From where to where a weight is looked for, both above zero."""

    low: float
    high: float


class Attempt(NamedTuple):
    values: Weights
    score: float
    """NaN where the attack came to nothing."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The values that were chosen, how they did in the rehearsal, and everything that was tried, in order."""

    values: Weights
    score: float
    trials: tuple[Attempt, ...] = field(repr=False)


def tune(
    make: Callable[[Weights], Attack],
    space: Mapping[str, Range],
    rehearsal: Scenario,
    threat: ThreatModel,
    *,
    first: Weights | None = None,
    trials: int = 20,
    seed: int = 0,
    device: str | None = None,
) -> Tuning:
    """The weights with which the attack recovers the attacker's own data with the best PSNR; `first` is tried first."""
    observation, truth = simulate(rehearsal, threat, seed=seed, device=device)

    def judged(values: Weights) -> float:
        trial = Trial(
            key=repr(values),
            setting=lambda _: Setting(observation=observation, truth=truth),
            attack=make(values),
            seed=seed,
            scoring=lambda: Scoring(metrics=("psnr",)),
        )
        outcome = run_trial(trial, device=device)
        if outcome.record is None:
            raise BadInput(outcome.reason)
        mean = (outcome.record.scores or {"means": {}})["means"].get("psnr")
        return math.nan if mean is None else float(mean)

    return search(judged, space, first=first, trials=trials, seed=seed)


def search(
    judged: Callable[[Weights], float],
    space: Mapping[str, Range],
    *,
    first: Weights | None = None,
    second: Weights | None = None,
    trials: int = 20,
    seed: int = 0,
) -> Tuning:
    """The values in `space` with the largest judgement; `first` and then `second` are tried before others."""
    starts = [dict(start) for start in (first, second) if start is not None]
    _check(space, starts, trials)
    try:
        import optuna
    except ImportError as error:
        raise BadInput(
            'optuna, the package for the search, is not installed. Run: pip install "fedprism-papers[tuning]"'
        ) from error
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # else it prints a line a trial
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction="maximize")
        for start in starts:
            study.enqueue_trial(start)
        study.optimize(  # a judgement that is NaN is a trial that failed
            lambda trial: judged({name: trial.suggest_float(name, *ends, log=True) for name, ends in space.items()}),
            n_trials=trials,
            callbacks=[lambda _, trial: progress.report(trial.number + 1, trials)],
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    tried = tuple(Attempt(trial.params, math.nan if trial.value is None else trial.value) for trial in study.trials)
    finished = [trial for trial in tried if not math.isnan(trial.score)]
    if not finished:
        raise BadInput(
            f"none of {trials} trials has a finite judgement. "
            "Look at the attack with the values you would choose by hand."
        )
    best = max(finished, key=lambda trial: trial.score)
    return Tuning(values=best.values, score=best.score, trials=tried)


def _check(space: Mapping[str, Range], starts: Sequence[Weights], trials: int) -> None:
    whole(trials, "trials", MOST_TRIALS)
    if not space:
        raise BadInput("the search needs at least one range. Name a weight and the range of its values.")
    for name, (low, high) in space.items():
        if not 0 < low < high < math.inf:
            raise BadInput(
                f"the range of {name} must have 0 < low < high, not {low:g} to {high:g}: "
                "it is searched on a logarithmic scale."
            )
        for start in starts:
            if not low <= start.get(name, math.nan) <= high:
                raise BadInput(
                    f"the first value of {name} must be from {low:g} to {high:g}, not {start.get(name)}. "
                    "Change it or widen the range."
                )
