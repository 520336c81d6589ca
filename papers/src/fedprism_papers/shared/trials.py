"""Trials of a recipe: computed once, several at a time where asked for, and kept so that a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism import __version__
from fedprism.errors import FedprismError, about_memory
from fedprism.files.tensors import write_bytes
from fedprism.runtime.executors import Failure, Processes
from fedprism_papers.shared.base import Announce, Settings

DECISIVE_SETTINGS = ("seed", "quick", "iterations", "batches", "inverted")
"""Settings that a trial's result depends on."""
FILE_NAME = re.compile(r"\.?[0-9a-f]{20}\.safetensors.*")
"""Of a stored result, and of one that a stop left half-written."""


class StoredResult(NamedTuple):
    """What came of a trial: what JSON can hold, and tensors."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class ResultStore:
    """One file per result, found by everything that determines the result. Without a folder nothing is kept."""

    folder: Path | None

    def get(self, key: Mapping[str, object], make: Callable[[], StoredResult]) -> StoredResult:
        """The result as it was made, now or in an earlier run; a damaged one is made again."""
        if self.folder is None:
            return make()
        text = json.dumps({**key, "versions": [__version__, str(torch.__version__)]}, sort_keys=True, default=str)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.safetensors"
        stored = _read(path, text)
        if stored is None:
            values, tensors = make()
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            # Through JSON also where it is new, so that a run that goes on gives what one in a single go does.
            stored = StoredResult(json.loads(json.dumps(values)), kept)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, save(kept, {"key": text, "values": json.dumps(values)}))
        return stored

    def clear(self) -> None:
        """Forget everything, so that the next run computes it anew; files of others stay."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if FILE_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self.folder.rmdir()


def _read(path: Path, key: str) -> StoredResult | None:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("key") != key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return StoredResult(json.loads(about["values"]), tensors)
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


class Trial(ABC):
    """Something that can be computed by itself. Its `repr` says which one it is, and a process can be sent it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is being done, for whoever waits."""

    @property
    def effort(self) -> float:
        """How long it takes, beside other trials: where several run at a time, the longest are begun first."""
        return 1.0

    @abstractmethod
    def run(self, settings: Settings) -> StoredResult: ...


def run_trials(trials: Iterable[Trial], settings: Settings, announce: Announce) -> Iterator[tuple[Trial, StoredResult]]:
    """Each trial with its result, as they are ready: in their order, unless several run at a time.

    One at a time, the next trial is asked for when the last one is done. What runs out of memory beside others is run
    again when they are done, alone.
    """
    if (settings.workers or 1) > 1:
        queue, trials = sorted(trials, key=lambda trial: -trial.effort), list[Trial]()
        announce(f"{len(queue)} trials, {settings.workers} at a time")
        results = Processes(workers=settings.workers).run(partial(run_trial, settings=settings), queue)
        for done, (number, result) in enumerate(results, start=1):
            trial = queue[number]
            if not isinstance(result, Failure):
                yield trial, result
            elif about_memory(result.reason):
                trials.append(trial)
            else:
                raise FedprismError(f"{trial.title}: {result.reason}")
            announce(f"{done} of {len(queue)} trials, {settings.workers} at a time; last: {trial.title}")
    for trial in trials:
        announce(trial.title)
        yield trial, run_trial(trial, replace(settings, workers=None))


def run_trial(trial: Trial, settings: Settings) -> StoredResult:
    """The trial's result, from now or from an earlier run."""
    key = {"trial": repr(trial), **{name: getattr(settings, name) for name in DECISIVE_SETTINGS}}
    return ResultStore(settings.finished).get(key, lambda: trial.run(settings))
