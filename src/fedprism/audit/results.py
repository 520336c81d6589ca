"""The results of a finished audit, and how to read them again.

plan.json              what is audited, with every default, and what data and weights were
records/, samples/, clock/   one outcome per cell (`experiments.store`)
results.json           all records in the order of the grid, and means over seeds; no clock, host or path
run.json               the clock, the host
summary.md, results.csv, junit.xml
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from fedprism.data.tabular import Column
from fedprism.errors import BadInput
from fedprism.experiments import Outcome, ResultStore
from fedprism.experiments.store import read_json
from fedprism.files.json_text import as_number

FORMAT = "fedprism-audit/2"
PLAN, RESULTS, RUN = "plan.json", "results.json", "run.json"
WORDS = "words.json"
"""How the tokens of texts are written: private, as the samples are, so not part of the results."""


@dataclass(frozen=True)
class Audit:
    """A finished audit. Records are read one at a time, however many there are."""

    root: Path
    plan: Mapping[str, Any]
    summary: Sequence[Mapping[str, Any]]
    """One entry per configuration: means over its seeds, intervals, null baselines."""
    skipped: Sequence[Mapping[str, str]]
    columns: tuple[Column, ...] | None
    """Of a table of which rows were kept."""
    keys: tuple[str, ...]
    """Cells in the order of the grid."""
    conclusion: Mapping[str, Any] = field(default_factory=dict)
    """The verdict, the exit code, and what came of every gate."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What data, weights and captures are, in a few letters each."""

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Outcome]:
        return map(ResultStore(self.root).get, self.keys)

    def samples(self, key: str) -> dict[str, Tensor] | None:
        """Some samples of a cell beside what came back; None where none were kept."""
        return ResultStore(self.root).samples(key)

    @cached_property
    def words(self) -> Mapping[int, str]:
        """How the tokens of texts are written, if some were kept; nothing if it cannot be read."""
        try:
            return TypeAdapter(dict[int, str]).validate_python(read_json(self.root / WORDS))
        except (BadInput, ValueError):
            return {}


def load_audit(folder: str | Path) -> Audit:
    """Read the folder of a finished audit."""
    root = Path(folder)
    document = read_json(root / RESULTS)
    try:
        keys = tuple(str(record["id"]) for record in document["records"])
        if document["format"] != FORMAT or not all(len(key) == 16 and key.isalnum() for key in keys):
            raise ValueError
        columns = TypeAdapter(tuple[Column, ...] | None).validate_python(document["columns"])
        conclusion = _numbers(document["conclusion"])
        fingerprint = TypeAdapter(dict[str, str]).validate_python(document["fingerprint"])
        if not isinstance(conclusion, dict) or not isinstance(conclusion["exit_code"], int):
            raise ValueError
        summary = _numbers(document["summary"])
        return Audit(root, document["plan"], summary, document["skipped"], columns, keys, conclusion, fingerprint)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{RESULTS} is not a file of {FORMAT}. Run the audit again.") from error


def _numbers(value: Any) -> Any:
    """Words that stand for infinities become numbers again, but not in sentences."""
    if isinstance(value, dict):
        return {key: item if key in ("status", "reason") else _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return as_number(value)
