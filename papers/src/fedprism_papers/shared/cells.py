"""Cells of a table: every method on the same updates, batch by batch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.errors import out_of_memory
from fedprism_papers.shared.base import Announce, Entry, Outcome, Settings
from fedprism_papers.shared.measuring import Scores, require_lpips
from fedprism_papers.shared.trials import StoredResult, Trial, run_trials

OUT_OF_MEMORY = "out of memory"
NOT_APPLICABLE = "does not apply"


class Measurement(NamedTuple):
    """What a method made of one batch."""

    scores: Scores
    seconds: float
    status: str


class Attacked(ABC):
    """What is attacked: batches of some size, how they are observed and how answers to them are scored."""

    size: int
    batches: int
    needs_lpips: ClassVar[bool] = False

    def sent(self, attack: Attack) -> str:
        """What the server sent to the clients: attacks for which it is the same share an update."""
        return ""

    @abstractmethod
    def observe(self, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, Any]:
        """What the server sees of batch `number`, and what answers are compared with."""

    @abstractmethod
    def score(self, attack: Attack, answer: fp.Reconstruction, truth: Any, settings: Settings) -> Scores: ...

    def measure(self, attack: Attack, observation: fp.Observation, truth: Any, settings: Settings) -> Measurement:
        start = time.perf_counter()
        answer = fp.run(attack, observation, seed=settings.seed, device=settings.device)
        seconds = time.perf_counter() - start  # the result lies on the CPU: a GPU has been waited for
        return Measurement(self.score(attack, answer, truth, settings), seconds, str(answer.status))

    def details(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, object]:
        """What else is said of all batches of a method, from the tensors of each."""
        return {}


@dataclass(frozen=True)
class TableCell:
    """The methods on every batch of what is attacked, but slow ones on the first few only (`fewer`)."""

    attacked: Attacked
    methods: Mapping[str, Attack]
    title: str
    fewer: Mapping[str, int] = field(default_factory=dict)

    def batches(self, method: str) -> int:
        return min(self.attacked.batches, self.fewer.get(method, self.attacked.batches))


class Outcomes(NamedTuple):
    entries: dict[str, Entry]
    notes: tuple[str, ...]
    """Why a method has no numbers."""


def attack_cell(
    attacked: Attacked, methods: Mapping[str, Attack], settings: Settings, announce: Announce, title: str
) -> Outcomes:
    """What each method makes of it, one after the other."""
    return next(attack_cells([TableCell(attacked, methods, title)], replace(settings, workers=None), announce))


def attack_cells(cells: Sequence[TableCell], settings: Settings, announce: Announce) -> Iterator[Outcomes]:
    """What each method makes of each cell. A method that runs out of memory or does not apply is left at that word."""
    if any(cell.attacked.needs_lpips for cell in cells):
        require_lpips(settings)
    results: list[dict[str, dict[int, StoredResult]]] = [{name: {} for name in cell.methods} for cell in cells]
    failed: list[dict[str, StoredResult]] = [{} for _ in cells]

    def trials() -> Iterator[Trial]:
        for place, cell in enumerate(cells):
            for number in range(cell.attacked.batches):
                for name, attack in cell.methods.items():
                    if name not in failed[place] and number < cell.batches(name):
                        yield AttackTrial(cell.attacked, place, number, name, attack, cell.title)

    def finished(place: int) -> bool:
        counts = {name: len(done) for name, done in results[place].items()}
        return all(name in failed[place] or count == cells[place].batches(name) for name, count in counts.items())

    next_place = 0
    for trial, result in run_trials(trials(), settings, announce):
        assert isinstance(trial, AttackTrial)
        if "failed" in result.values:
            failed[trial.place][trial.name] = result
        else:
            results[trial.place][trial.name][trial.number] = result
        while next_place < len(cells) and finished(next_place):
            yield _outcomes(cells[next_place], results[next_place], failed[next_place])
            next_place += 1


@dataclass(frozen=True)
class AttackTrial(Trial):
    """One method on one batch; `place` is the cell's in the table."""

    attacked: Attacked
    place: int
    number: int
    name: str
    attack: Attack
    about: str

    @property
    def title(self) -> str:
        return f"{self.about}, batch {self.number + 1} of {self.attacked.batches}: {self.name}"

    @property
    def effort(self) -> float:
        return float(self.attacked.size)

    def run(self, settings: Settings) -> StoredResult:
        try:
            observation, truth = _observed(self.attacked, self.attack, self.number, settings)
            scores, seconds, status = self.attacked.measure(self.attack, observation, truth, settings)
        except fp.NotApplicable as reason:
            return StoredResult({"failed": NOT_APPLICABLE, "reason": str(reason)}, {})
        except Exception as error:
            if not out_of_memory(error) or (settings.workers or 1) > 1:  # alone there may be enough
                raise
            return StoredResult({"failed": OUT_OF_MEMORY}, {})
        return StoredResult({"values": scores.values, "seconds": seconds, "status": status}, scores.tensors)


_last: list[tuple[tuple[object, ...], tuple[fp.Observation, Any]]] = []
"""The last observation: the same for every method, one after the other."""


def _observed(attacked: Attacked, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, Any]:
    key = (attacked, attacked.sent(attack), number, settings)
    if not _last or _last[0][0] != key:
        _last.clear()  # two of them need not fit into memory
        _last.append((key, attacked.observe(attack, number, settings)))
    return _last[0][1]


def _outcomes(
    cell: TableCell, results: Mapping[str, Mapping[int, StoredResult]], failed: Mapping[str, StoredResult]
) -> Outcomes:
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    for name, attack in cell.methods.items():
        if name not in failed:
            in_order = [results[name][number] for number in range(cell.batches(name))]
            entries[name] = _outcome(cell.attacked, attack, in_order)
            continue
        values = failed[name].values
        entries[name] = str(values["failed"])
        if "reason" in values:
            notes.append(f"{cell.title}, {name}: {values['reason']}")
    return Outcomes(entries, tuple(notes))


def _outcome(attacked: Attacked, attack: Attack, results: Sequence[StoredResult]) -> Outcome:
    first = results[0].tensors
    return Outcome(
        values=by_metric([result.values["values"] for result in results]),
        seconds=tuple(result.values["seconds"] for result in results),
        statuses=tuple(result.values["status"] for result in results),
        settings=repr(attack),
        details=attacked.details([result.tensors for result in results]),
        pictures=(first["originals"], first["recovered"]) if "originals" in first else None,
    )


def by_metric(values: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """The values of every metric, of the batches that have it."""
    metrics = dict.fromkeys(metric for batch in values for metric in batch)
    return {metric: tuple(batch[metric] for batch in values if metric in batch) for metric in metrics}
