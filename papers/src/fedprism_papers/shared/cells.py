"""Cells of a table: every method on the same updates, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.errors import about_memory
from fedprism.experiments import Judgement, Outcome, Setting, Trial, summarised
from fedprism_papers.shared.base import Announce, Entry, Measured, Settings
from fedprism_papers.shared.measuring import Scores, require_lpips
from fedprism_papers.shared.trials import Finished, RecipeTrial, finished, packed

OUT_OF_MEMORY = "out of memory"
NOT_APPLICABLE = "does not apply"


class Attacked(ABC):
    """What is attacked: batches of some size, how they are observed and how answers to them are scored."""

    size: int
    batches: int
    needs_lpips: ClassVar[bool] = False

    def sent(self, attack: Attack) -> str:
        """What the server sent to the clients: attacks for which it is the same share an update."""
        return ""

    def first_stage(self, attack: Attack) -> Attack:
        """What is run on the update; the rest of the attack, if any, is up to `score`."""
        return attack

    @abstractmethod
    def observe(self, attack: Attack, number: int, settings: Settings) -> tuple[fp.Observation, Any]:
        """What the server sees of batch `number`, and what answers are compared with."""

    @abstractmethod
    def score(self, trial: AttackTrial, answer: fp.Reconstruction, truth: Any) -> Scores: ...

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


@dataclass(frozen=True)
class AttackTrial(RecipeTrial):
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

    def run(self, device: str | None) -> Outcome:
        trial = Trial(
            key=self.key,
            description=self.description,
            setting=lambda _: Setting(observation=self.observed()[0]),
            attack=self.attacked.first_stage(self.attack),
            seed=self.settings.seed,
            scoring=lambda: self,
        )
        return trial.run(device)

    def judge(self, setting: Setting, answer: fp.Reconstruction) -> Judgement:
        """The recipe's own scores, one mean of the batch for each metric."""
        scores = self.attacked.score(self, answer, self.observed()[1])
        means = summarised({metric: (value,) for metric, value in scores.values.items()})
        return Judgement(means, tensors=packed(scores.tensors), seconds=scores.seconds)

    def observed(self) -> tuple[fp.Observation, Any]:
        """What the server sees, and what answers are compared with."""
        key = (self.attacked, self.attacked.sent(self.attack), self.number, self.settings)
        if not _last or _last[0][0] != key:
            _last.clear()  # two of them need not fit into memory
            _last.append((key, self.attacked.observe(self.attack, self.number, self.settings)))
        return _last[0][1]


_last: list[tuple[tuple[object, ...], tuple[fp.Observation, Any]]] = []
"""The last observation: the same for every method, one after the other."""


def attack_cell(
    attacked: Attacked, methods: Mapping[str, Attack], settings: Settings, announce: Announce, title: str
) -> Outcomes:
    """What each method makes of it, one after the other."""
    return next(attack_cells([TableCell(attacked, methods, title)], replace(settings, workers=None), announce))


def attack_cells(cells: Sequence[TableCell], settings: Settings, announce: Announce) -> Iterator[Outcomes]:
    """What each method makes of each cell. A method that runs out of memory or does not apply is left at that word."""
    if any(cell.attacked.needs_lpips for cell in cells):
        require_lpips(settings)
    results: list[dict[str, list[Finished[AttackTrial]]]] = [{name: [] for name in cell.methods} for cell in cells]

    def failed(place: int, name: str) -> bool:
        return any(result.outcome.record is None for result in results[place][name])

    def trials() -> Iterator[AttackTrial]:
        for place, cell in enumerate(cells):
            for number, (name, attack) in product(range(cell.attacked.batches), cell.methods.items()):
                if number < cell.batches(name) and not failed(place, name):
                    yield AttackTrial(settings, cell.attacked, place, number, name, attack, cell.title)

    def complete(place: int) -> bool:
        done = results[place].items()
        return all(failed(place, name) or len(each) == cells[place].batches(name) for name, each in done)

    next_place = 0
    for result in finished(trials(), settings, announce, allowed=True):
        results[result.trial.place][result.trial.name].append(result)
        while next_place < len(cells) and complete(next_place):
            yield _outcomes(cells[next_place], results[next_place])
            next_place += 1


def _outcomes(cell: TableCell, results: Mapping[str, Sequence[Finished[AttackTrial]]]) -> Outcomes:
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    for name, attack in cell.methods.items():
        reasons = [result.outcome.reason for result in results[name] if result.outcome.record is None]
        if not reasons:
            in_order = sorted(results[name], key=lambda result: result.trial.number)
            entries[name] = _outcome(cell.attacked, attack, in_order)
        elif about_memory(reasons[0]):
            entries[name] = OUT_OF_MEMORY
        else:
            entries[name] = NOT_APPLICABLE
            notes.append(f"{cell.title}, {name}: {reasons[0]}")
    return Outcomes(entries, tuple(notes))


def _outcome(attacked: Attacked, attack: Attack, results: Sequence[Finished[AttackTrial]]) -> Measured:
    records = [result.outcome.record for result in results if result.outcome.record is not None]
    first = results[0].tensors
    return Measured(
        values=by_metric([record.scores["means"] for record in records if record.scores is not None]),
        seconds=tuple(result.outcome.attack_seconds or 0.0 for result in results),
        statuses=tuple(record.status for record in records),
        settings=repr(attack),
        details=attacked.details([result.tensors for result in results]),
        pictures=(first["originals"], first["recovered"]) if "originals" in first else None,
    )


def by_metric(values: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """The values of every metric, of the batches that have it."""
    metrics = dict.fromkeys(metric for batch in values for metric in batch)
    return {metric: tuple(batch[metric] for batch in values if metric in batch) for metric in metrics}
