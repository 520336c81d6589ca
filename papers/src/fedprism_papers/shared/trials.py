"""Trials of a recipe: run and kept as all experiments are, so that a stopped run continues from what is finished."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from fedprism import __version__
from fedprism.errors import FedprismError, about_memory
from fedprism.experiments import Outcome, ResultStore, run_trials
from fedprism.experiments.outcome import identity
from fedprism.runtime.executors import Processes
from fedprism_papers.shared.base import Announce, Settings

DECISIVE_SETTINGS = ("seed", "quick", "iterations", "batches", "inverted", "encodings", "tune")
"""Settings that a trial's outcome depends on."""


@dataclass(frozen=True)
class RecipeTrial:
    """Something that can be computed by itself. Its `repr` says which one it is, and a process can be sent it."""

    settings: Settings = field(repr=False)

    @property
    @abstractmethod
    def title(self) -> str:
        """What is being done, for whoever waits."""

    @property
    def effort(self) -> float:
        """How long it takes, beside other trials: where several run at a time, the longest are begun first."""
        return 1.0

    @property
    def description(self) -> Mapping[str, str]:
        """Everything that decides the outcome."""
        decisive = {name: repr(getattr(self.settings, name)) for name in DECISIVE_SETTINGS}
        return {"trial": repr(self), **decisive, "versions": f"{__version__}, {torch.__version__}"}

    @property
    def key(self) -> str:
        return identity(self.description)

    @abstractmethod
    def run(self, device: str | None) -> Outcome: ...

    def done(
        self, values: Mapping[str, Any], tensors: Mapping[str, Tensor], attack_seconds: float | None = None
    ) -> Outcome:
        """The outcome of this trial, if it is no attack with a record."""
        return Outcome(
            key=self.key,
            description=self.description,
            state="done",
            values={**values, "tensors": sorted(tensors)},
            tensors=packed(tensors),
            attack_seconds=attack_seconds,
        )


AnyTrial = TypeVar("AnyTrial", bound=RecipeTrial)


class Finished(NamedTuple, Generic[AnyTrial]):
    """A trial with its outcome, as the store has it, and the tensors it kept."""

    trial: AnyTrial
    outcome: Outcome
    tensors: Mapping[str, Tensor]


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def earlier_tensors(trial: RecipeTrial) -> Mapping[str, Tensor] | None:
    """What a trial of the same run kept, if that is finished and lies in a folder."""
    store = ResultStore(trial.settings.finished, samples_needed=True) if trial.settings.finished is not None else None
    return store.samples(trial.key) if store is not None and store.finished(trial.key) else None


def finished(
    trials: Iterable[AnyTrial], settings: Settings, announce: Announce, *, allowed: bool = False
) -> Iterator[Finished[AnyTrial]]:
    """Each trial with its outcome, as they are ready; one that came to nothing ends the recipe, but if `allowed`."""
    with TemporaryDirectory() as scratch:
        store = ResultStore(settings.finished or Path(scratch), samples_needed=True)
        store.prepare()
        for trial in _run(trials, store, settings, announce):
            outcome = store.get(trial.key)
            if outcome.state != "done" and not (
                allowed and (outcome.state == "skipped" or about_memory(outcome.reason))
            ):
                raise FedprismError(f"{trial.title}: {outcome.reason}")
            yield Finished(trial, outcome, store.samples(trial.key) or {})


def finish(trial: AnyTrial, announce: Announce) -> Finished[AnyTrial]:
    """One trial with its outcome."""
    return next(finished([trial], replace(trial.settings, workers=None), announce))


def _run(trials: Iterable[AnyTrial], store: ResultStore, settings: Settings, announce: Announce) -> Iterator[AnyTrial]:
    """Trials as their outcomes lie in the store."""
    if (settings.workers or 1) == 1:
        for trial in trials:
            announce(trial.title)
            list(run_trials([trial], store, _Here(), device=settings.device))
            yield trial
        return
    queue = sorted(trials, key=lambda trial: -trial.effort)
    left = {trial.key: trial for trial in queue if not store.finished(trial.key)}
    yield from (trial for trial in queue if trial.key not in left)
    announce(f"{len(left)} trials, {settings.workers} at a time")
    outcomes = run_trials(list(left.values()), store, Processes(workers=settings.workers), device=settings.device)
    for done, outcome in enumerate(outcomes, start=1):
        trial = left[outcome.key]
        yield trial
        announce(f"{done} of {len(left)} trials, {settings.workers} at a time; last: {trial.title}")


class _Here:
    """Runs in this process and lets errors that nobody expected end the recipe."""

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return enumerate(map(function, tasks))
