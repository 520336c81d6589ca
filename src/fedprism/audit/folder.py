"""The folder of an audit, and how to read it again.

plan.json              what is audited, with every default, and what data and weights were
records/ID.json        one a cell: written when the cell is finished, in one step, never changed
samples/ID.safetensors some samples of the cell beside what came back, where the plan keeps them
clock/ID.json          how long the cell took: apart, because it differs from run to run
results.json           all records in the order of the grid, and means over seeds; no clock, host or path
run.json               the clock, the host
summary.md, results.csv, junit.xml and, where pyarrow is installed, results.parquet
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from torch import Tensor

from fedprism import results
from fedprism.audit import records
from fedprism.audit.cell import Finished
from fedprism.checks import shown
from fedprism.data.tabular import Column
from fedprism.errors import BadInput
from fedprism.tensors import TensorFile, write_bytes

FORMAT = "fedprism-audit/1"
PLAN, RESULTS, RUN = "plan.json", "results.json", "run.json"
RECORDS, SAMPLES, CLOCK = "records", "samples", "clock"
MOST_JSON_BYTES = 2**30


class Clock(NamedTuple):
    seconds: float
    time_factor: float | None
    """The time of a step under a defense over that without."""
    share: float = 1.0
    """Which part of the usual amount was worked on at a time, because memory ran out."""


@dataclass(frozen=True)
class AuditFolder:
    """Writes and reads the files of one audit."""

    root: Path

    @property
    def begun(self) -> bool:
        return (self.root / PLAN).is_file()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Make the folder of a new audit."""
        with self._writing():
            for name in (RECORDS, SAMPLES, CLOCK):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            write_bytes(self.root / PLAN, results.as_json(about))

    def about(self) -> dict[str, Any]:
        """What plan.json says."""
        return self._json(self.root / PLAN)

    def clear_remains(self) -> None:
        """Remove what a killed run had begun to write."""
        with self._writing():
            for folder in (self.root, *(self.root / name for name in (RECORDS, SAMPLES, CLOCK))):
                for path in folder.glob(".*.json.*"):
                    path.unlink()
                for path in folder.glob(".*.safetensors.*"):
                    path.unlink()

    def write(self, finished: Finished) -> None:
        """Keep a finished cell. The record comes last: it says that the rest is there."""
        with self._writing():
            if finished.tensors is not None:
                write_bytes(self.root / SAMPLES / f"{finished.id}.safetensors", finished.tensors)
            clock = {"seconds": finished.seconds, "time_factor": finished.time_factor, "share": finished.share}
            write_bytes(self.root / CLOCK / f"{finished.id}.json", results.as_json(clock))
            write_bytes(self.root / RECORDS / f"{finished.id}.json", records.written(finished))

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files beside the records, each in one step."""
        with self._writing():
            for name, content in files.items():
                write_bytes(self.root / name, content)

    def has(self, cell: str) -> bool:
        return (self.root / RECORDS / f"{cell}.json").is_file()

    def read(self, cell: str) -> Finished:
        """The record of a cell, with the clock's numbers where they are there."""
        path = self.root / RECORDS / f"{cell}.json"
        try:
            found = records.parsed(self._json(path), cell)
        except (ValueError, RecursionError) as error:
            raise BadInput(
                f"expected the record of a cell in '{path.name}', found a damaged one; finish the audit with --resume."
            ) from error
        return replace(found, **self.clock(cell)._asdict())

    def clock(self, cell: str) -> Clock:
        """How long a cell took; zero where nothing says."""
        found: dict[str, Any] = {}
        with contextlib.suppress(BadInput):
            found = self._json(self.root / CLOCK / f"{cell}.json")
        seconds, factor, share = (_positive(found.get(name)) for name in ("seconds", "time_factor", "share"))
        return Clock(seconds or 0.0, factor, share or 1.0)

    def samples(self, cell: str) -> dict[str, Tensor] | None:
        """Samples of the cell in pixels, images as bytes.

        `recovered` and, where the truth is known, `originals` in the same order, `answered` and `indices` in the batch;
        from what fared worst for its owner to the best.
        """
        path = self.root / SAMPLES / f"{cell}.safetensors"
        if not path.is_file():
            return None
        file = TensorFile(path)
        return {name: file[name] for name in file}

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            if not path.is_file():  # a pipe would never end
                raise ValueError("no such file")
            if path.stat().st_size > MOST_JSON_BYTES:
                raise ValueError("too large")
            found = json.loads(path.read_bytes(), parse_constant=_no_number)
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error  # without the path a second time
            raise BadInput(
                f"expected the file {shown(path.name)} of an audit, found none that can be read ({reason}); point at "
                "a folder that fedprism audit wrote."
            ) from error
        if not isinstance(found, dict):
            raise BadInput(f"expected a table in {shown(path.name)}, found another value; run the audit again.")
        return found

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadInput(
                f"expected room to write in '{self.root}', found that it cannot be written "
                f"({error.strerror or error}); earlier results are intact: make room and add --resume."
            ) from error


@dataclass(frozen=True)
class Audit:
    """A finished audit. Records are read one at a time, however many there are."""

    root: Path
    plan: Mapping[str, Any]
    summary: Sequence[Mapping[str, Any]]
    """One entry a configuration: means over its seeds, intervals, null baselines."""
    skipped: Sequence[Mapping[str, str]]
    columns: tuple[Column, ...] | None
    """Of a table of which rows were kept."""
    ids: tuple[str, ...]
    """Cells in the order of the grid."""
    gates: Sequence[Mapping[str, Any]] = ()
    """What was asked for with --fail-above, and what came of it."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Finished]:
        return (AuditFolder(self.root).read(cell) for cell in self.ids)

    def samples(self, cell: str) -> dict[str, Tensor] | None:
        """Some samples of a cell beside what came back; None where none were kept."""
        return AuditFolder(self.root).samples(cell)


def load_audit(folder: str | Path) -> Audit:
    """Read the folder of a finished audit."""
    files = AuditFolder(Path(folder))
    found = files._json(files.root / RESULTS)
    try:
        ids = tuple(str(record["id"]) for record in found["records"])
        if found["format"] != FORMAT or not all(len(cell) == 16 and cell.isalnum() for cell in ids):
            raise ValueError
        read = TypeAdapter(tuple[Column, ...] | None).validate_python(found["columns"])
        gates = _numbers(found.get("gates", []))
        return Audit(files.root, found["plan"], _numbers(found["summary"]), found["skipped"], read, ids, gates)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"expected {RESULTS} of {FORMAT}, found another; run the audit again.") from error


def _no_number(word: str) -> float:
    """Infinities are written as words in quotes, so that every reader accepts them."""
    raise ValueError(f"{word} is no number of JSON")


def _positive(value: Any) -> float | None:
    """A number that a clock can have shown."""
    return value if isinstance(value, float) and 0 <= value < math.inf else None


_WORDS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def _numbers(value: Any) -> Any:
    """JSON has no infinity; `results.as_json` writes the word."""
    if isinstance(value, dict):
        return {key: item if key in ("status", "reason") else _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value
