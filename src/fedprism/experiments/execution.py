"""Runs trials, anywhere: one policy for errors, memory and what does not repeat."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from fedprism.errors import (
    FedprismError,
    MissingKnowledge,
    NotApplicable,
    about_memory,
    out_of_memory,
    told,
    users_place,
)
from fedprism.experiments.outcome import Outcome, State
from fedprism.experiments.store import ResultStore
from fedprism.runtime import memory
from fedprism.runtime.executors import Executor, Failure, Processes, RayCluster, Serial
from fedprism.runtime.repeatable import one_thread, repeatable

OUT_OF_MEMORY = "out of memory"
KEPT_BETWEEN_TRIALS = 2**30
"""Bytes of a GPU that a worker may keep between trials: looking for garbage takes a quarter of a second each time."""
LEAST_SHARE = 1 / 64
"""Of the usual amount at a time: what still needs more memory than there is, fails."""


class Runnable(Protocol):
    """A trial, or anything else with an outcome, such as a training run."""

    @property
    def key(self) -> str: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    def run(self, device: str | None) -> Outcome: ...


def run_trial(trial: Runnable, *, device: str | None = None, memory_share: float = 1.0) -> Outcome:
    """A method that does not apply is a skipped trial, an error of the input a failed one; other errors are raised.

    memory_share: which part of the usual amount is worked on at a time.
    """
    start = time.perf_counter()
    try:
        with one_thread(), repeatable(), memory.limited_to(memory_share) as memory_use:
            outcome = trial.run(device)
    except (NotApplicable, MissingKnowledge) as reason:
        outcome = without_result(trial, str(reason), "skipped")
    except FedprismError as reason:
        outcome = without_result(trial, str(reason))
    except Exception as error:
        if not out_of_memory(error):
            if users_place(error) is None:
                raise
            return without_result(trial, f"your model, loss or data raised {told(error)}.")
        outcome = without_result(trial, _too_much(memory_share), divisible=memory_use.divisible)
    _give_back()
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start, memory_share=memory_share)


def run_trials(
    trials: Sequence[Runnable],
    store: ResultStore,
    executor: Executor | None = None,
    *,
    device: str | None = None,
) -> Iterator[Outcome]:
    """Run the trials that have no outcome yet; each one is on disk before the next one is looked at.

    What ran out of memory beside other trials gets another chance with all of it, so the number of workers plays no
    part in the numbers. What runs out of it alone works on half as much at a time, and on half of that.
    """
    left = [trial for trial in trials if not store.finished(trial.key)]
    for outcome in _outcomes(left, executor or Serial(), partial(run_trial, device=device)):
        store.put(outcome)
        yield outcome


def without_result(trial: Runnable, reason: str, state: State = "failed", *, divisible: bool = False) -> Outcome:
    """The outcome of a trial that was skipped or failed."""
    reason = " ".join(reason.split())
    return Outcome(key=trial.key, description=trial.description, state=state, reason=reason, divisible=divisible)


def _outcomes(trials: Iterable[Runnable], executor: Executor, run: Callable[..., Outcome]) -> Iterator[Outcome]:
    left, memory_share = list(trials), 1.0
    if _shares_memory(executor) and len(left) > 1:
        again: list[Runnable] = []
        for index, result in executor.run(partial(run, memory_share=memory_share), left):
            outcome = _settled(left[index], result)
            if outcome.state == "failed" and about_memory(outcome.reason):
                again.append(left[index])
            else:
                yield outcome
        left = again
    while left:
        again = []
        for index, result in _one_by_one(executor, partial(run, memory_share=memory_share), left):
            outcome = _settled(left[index], result)
            if outcome.divisible and memory_share > LEAST_SHARE:
                again.append(left[index])
            else:
                yield outcome
        left, memory_share = again, memory_share / 2


def _shares_memory(executor: Executor) -> bool:
    return isinstance(executor, RayCluster) or (isinstance(executor, Processes) and executor.workers != 1)


def _one_by_one(
    executor: Executor, function: Callable[[Runnable], Outcome], trials: Sequence[Runnable]
) -> Iterator[tuple[int, Outcome | Failure]]:
    """Outcomes of trials of which no two run at a time."""
    if isinstance(executor, RayCluster):
        for index, trial in enumerate(trials):
            yield from ((index, result) for _, result in executor.run(function, [trial]))
        return
    yield from (replace(executor, workers=1) if isinstance(executor, Processes) else executor).run(function, trials)


def _settled(trial: Runnable, result: Outcome | Failure) -> Outcome:
    """A process that was killed may have asked for too much: then nobody knows whether it can do with less."""
    if isinstance(result, Failure):
        return without_result(trial, result.reason, divisible=about_memory(result.reason))
    return result


def _too_much(memory_share: float) -> str:
    tried = "" if memory_share == 1 else f", even with 1/{round(1 / memory_share)} of the usual amount at a time"
    return f"{OUT_OF_MEMORY}: the run needs more than there is{tried}; use a smaller batch or model"


def _give_back() -> None:
    """Leave a GPU's memory to other workers, and to the next attempt. Little is not worth the search for garbage."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    reserved = map(torch.cuda.memory_reserved, range(torch.cuda.device_count()))
    if any(number > KEPT_BETWEEN_TRIALS for number in reserved):
        gc.collect()
        torch.cuda.empty_cache()
