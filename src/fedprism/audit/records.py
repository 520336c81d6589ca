"""A cell's record on disk: written with a digest, and believed only if all of it is as it was written.

A folder may come from anywhere, and a power cut or a bad disk may leave anything: what is not a record in every part of
it is none, so that its cell is run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedprism import results
from fedprism.audit.cell import Finished, Outcome
from fedprism.audit.grid import identity
from fedprism.types import Record

_WORDS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
Number = Annotated[float, BeforeValidator(lambda value: _WORDS.get(value, value) if isinstance(value, str) else value)]
"""JSON has no infinity; `results.as_json` writes the word."""
Count = Annotated[int, Field(ge=0, le=2**53)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _AttackScores(_Strict):
    values: dict[str, list[Number | None]]
    means: dict[str, Number | None]
    samples: Count
    answered: Count
    labels_match: bool | None = None
    resolved: list[str] = []
    unavailable: dict[str, str] = {}
    by_column: dict[str, Number] = {}
    tolerance: Number | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """A mean is one of values."""
        answered = {name for name, each in self.values.items() if any(value is not None for value in each)}
        if self.values.keys() != self.means.keys() or answered != {n for n, m in self.means.items() if m is not None}:
            raise ValueError("means that are not those of the values")
        return self


class _UtilityScores(_Strict):
    accuracy: list[Number]
    seeds: list[Count]
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)] | None
    delta: Number | None
    release_epsilon: Number | None


class _Record(_Strict):
    kind: Literal["attack", "utility"]
    cell: dict[str, Any]
    knowledge_used: list[str]
    scores: dict[str, Any] | None
    accuracy: Number | None
    time_factor: Number | None
    epsilon: Number | None
    residual: Number | None
    status: str
    seed: Count
    versions: dict[str, str]

    def made(self) -> Record:
        """With scores as their kind has them."""
        kind = _AttackScores if self.kind == "attack" else _UtilityScores
        scores = None if self.scores is None else kind.model_validate(self.scores).model_dump(exclude_unset=True)
        return Record(**{**dict(self), "knowledge_used": tuple(self.knowledge_used), "scores": scores})


class _File(_Strict):
    id: str
    cell: dict[str, str | int]
    outcome: Outcome
    reason: str
    record: _Record | None
    baselines: dict[str, dict[str, Number | None]]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if identity(self.cell) != self.id or (self.record is None) != (self.outcome != "done"):
            raise ValueError("a record of another cell, or an outcome without one")
        return self


def written(finished: Finished) -> bytes:
    """What of a finished cell repeats exactly, as its file holds it."""
    content = {
        "id": finished.id,
        "cell": dict(finished.cell),
        "outcome": finished.outcome,
        "reason": finished.reason,
        "record": dataclasses.asdict(finished.record) if finished.record is not None else None,
        "baselines": dict(finished.baselines),
    }
    plain = json.loads(results.as_json(content))
    return results.as_json({**plain, "digest": _digest(plain)})


def parsed(document: Mapping[str, Any], cell: str) -> Finished:
    """The record of a cell; a ValueError where it is none, is another's, or was changed."""
    content = {key: value for key, value in document.items() if key != "digest"}
    if document.get("digest") != _digest(content):
        raise ValueError("not as it was written")
    found = _File.model_validate(content)
    if found.id != cell:
        raise ValueError("the record of another cell")
    return Finished(
        id=found.id,
        cell=found.cell,
        outcome=found.outcome,
        reason=found.reason,
        record=None if found.record is None else found.record.made(),
        baselines=found.baselines,
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
