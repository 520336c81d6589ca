"""The outcome of a trial: in memory, and as a file that is believed only if all of it is as it was written.

A folder may come from anywhere, and a power cut or a bad disk may leave anything: what is not a record in every part of
it is none, so that its trial is run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fedprism.display.words import ShortRepr
from fedprism.files import json_text
from fedprism.files.strict import Strict
from fedprism.types import Record

State = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome(ShortRepr):
    """What came of a trial: a record, or `values` where what was tried is no attack and no training.

    Seconds and `time_factor` are the clock's, and kept apart from what repeats exactly.
    """

    key: str
    description: Mapping[str, Any]
    """What was tried, in words and numbers."""
    state: State
    reason: str = ""
    """Why it was skipped or failed."""
    record: Record | None = None
    baselines: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict, repr=False)
    """Mean score of each baseline."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What JSON can hold of a trial that has no record."""
    tensors: bytes | None = None
    """A safetensors file with some of the samples with their reconstructions."""
    seconds: float = 0.0
    attack_seconds: float | None = None
    """How much of it the attack took."""
    time_factor: float | None = None
    memory_share: float = 1.0
    """Which part of the usual amount was worked on at a time: less where memory ran out."""
    divisible: bool = False
    """Whether memory ran out of a trial that could work on less at a time."""


def identity(description: Mapping[str, Any]) -> str:
    """The key of a trial: 16 letters that depend on what is tried and on nothing else."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def written(outcome: Outcome) -> bytes:
    """The part of an outcome that repeats exactly, as its file holds it."""
    content = {
        "id": outcome.key,
        "run": dict(outcome.description),
        "outcome": outcome.state,
        "reason": outcome.reason,
        "record": dataclasses.asdict(outcome.record) if outcome.record is not None else None,
        "baselines": dict(outcome.baselines),
        **({"values": dict(outcome.values)} if outcome.values else {}),
    }
    plain = json.loads(json_text.as_json(content))
    return json_text.as_json({**plain, "digest": _digest(plain)})


def parsed(document: Mapping[str, Any], key: str) -> Outcome:
    """The outcome in a file; a ValueError if it is none, is another trial's, or was changed."""
    content = {name: value for name, value in document.items() if name != "digest"}
    if document.get("digest") != _digest(content):
        raise ValueError("not as it was written")
    file = _File.model_validate(content)
    if file.id != key:
        raise ValueError("the record of another trial")
    return Outcome(
        key=file.id,
        description=file.run,
        state=file.outcome,
        reason=file.reason,
        record=None if file.record is None else file.record.made(),
        baselines=file.baselines,
        values=json_text.as_numbers(file.values),
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


Number = Annotated[float, BeforeValidator(json_text.as_number)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class _AttackScores(Strict):
    values: dict[str, list[Number | None]]
    means: dict[str, Number | None]
    samples: Count
    answered: Count
    labels_match: bool | None = None
    resolved: list[str] = Field(default_factory=list)
    unavailable: dict[str, str] = Field(default_factory=dict)
    by_column: dict[str, Number] = Field(default_factory=dict)
    tolerance: Number | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """A mean is one of values."""
        answered = {name for name, each in self.values.items() if any(value is not None for value in each)}
        if self.values.keys() != self.means.keys() or answered != {n for n, m in self.means.items() if m is not None}:
            raise ValueError("means that are not those of the values")
        return self


class _UtilityScores(Strict):
    accuracy: list[Number]
    seeds: list[Count]
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)] | None
    delta: Number | None
    release_epsilon: Number | None


class _Ceiling(Strict):
    metric: str
    values: list[Number]
    confidence: Annotated[float, Field(gt=0, lt=1)]
    pairs: Count
    prior: str
    linearised: list[Number] | None
    from_epsilon: Number | None
    status: str


class _Update(Strict):
    client: str | None
    round: int
    samples: Count
    residual: Number | None
    recovered: bool


class _Record(Strict):
    kind: Literal["attack", "utility", "ceiling"]
    run: dict[str, Any]
    knowledge_used: list[str]
    scores: dict[str, Any] | None
    accuracy: Number | None
    time_factor: Number | None
    epsilon: Number | None
    residual: Number | None
    updates: list[_Update] = Field(default_factory=list)
    ceiling: _Ceiling | None = None
    status: str
    seed: Count
    versions: dict[str, str]

    def made(self) -> Record:
        """With scores as their kind has them."""
        kind = _AttackScores if self.kind == "attack" else _UtilityScores
        scores = None if self.scores is None else kind.model_validate(self.scores).model_dump(exclude_unset=True)
        ceiling = None if self.ceiling is None else self.ceiling.model_dump()
        updates = tuple(each.model_dump() for each in self.updates)
        changed: dict[str, Any] = {"knowledge_used": tuple(self.knowledge_used), "scores": scores, "ceiling": ceiling}
        changed["updates"] = updates
        return Record(**{**dict(self), **changed})


class _File(Strict):
    id: str
    run: dict[str, str | int]
    outcome: State
    reason: str
    record: _Record | None
    baselines: dict[str, dict[str, Number | None]]
    values: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        result = self.record is not None or bool(self.values)
        if identity(self.run) != self.id or result != (self.outcome == "done"):
            raise ValueError("a record of another trial, or an outcome without one")
        return self
