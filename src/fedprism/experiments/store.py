"""A folder of outcomes: each is written in one step when its trial is finished, and never changed.

records/KEY.json        what repeats exactly
samples/KEY.safetensors some samples beside what came back, where the trial keeps them
clock/KEY.json          how long it took: apart, because it differs from run to run
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import BadCapture, BadInput
from fedprism.experiments.outcome import Outcome, parsed, written
from fedprism.files import json_text
from fedprism.files.tensors import TensorFile, write_bytes

RECORDS, SAMPLES, CLOCK = "records", "samples", "clock"
STORED_NAME = re.compile(r"\.?[0-9a-f]{16}\.(json|safetensors).*")
"""Files of an outcome, and what a kill left half-written of them."""
MOST_JSON_BYTES = 2**30
"""A larger file is not read into memory."""


class Clock(NamedTuple):
    seconds: float
    time_factor: float | None
    """The time of a step under a defense over that without."""
    memory_share: float = 1.0
    """Which part of the usual amount was worked on at a time, because memory ran out."""
    attack_seconds: float | None = None


@dataclass(frozen=True)
class ResultStore:
    """Writes and reads the outcomes in a folder."""

    root: Path
    samples_needed: bool = False
    """Whether a finished trial is run again if its samples are gone; those of audits may be deleted."""

    def prepare(self) -> None:
        """Make the folders, and remove what a killed run had begun to write."""
        with self.writing():
            for folder in (self.root, *(self.root / name for name in (RECORDS, SAMPLES, CLOCK))):
                folder.mkdir(parents=True, exist_ok=True)
                for pattern in (".*.json.*", ".*.safetensors.*"):
                    for path in folder.glob(pattern):
                        path.unlink()

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome. The record comes last: it says that the rest is there."""
        with self.writing():
            if outcome.tensors is not None:
                write_bytes(self._samples_path(outcome.key), outcome.tensors)
            clock = {name: getattr(outcome, name) for name in Clock._fields}
            write_bytes(self.root / CLOCK / f"{outcome.key}.json", json_text.as_json(clock))
            write_bytes(self.record_path(outcome.key), written(outcome))

    def get(self, key: str) -> Outcome:
        """The outcome of a trial, with the clock's numbers where they are there."""
        path = self.record_path(key)
        try:
            outcome = parsed(read_json(path), key)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the record '{path.name}' is damaged. Finish the audit with --resume.") from error
        return replace(outcome, **self.clock(key)._asdict())

    def finished(self, key: str) -> bool:
        """Whether a trial needs no other try. A file that cannot be read, after a power cut, is as good as none."""
        try:
            if not self.record_path(key).is_file() or (outcome := self.get(key)).state == "failed":
                return False
            samples = self._samples_path(key)
            if samples.is_file():
                TensorFile(samples)  # reads the header, which says how long the file is
            return samples.is_file() or outcome.state == "skipped" or not self.samples_needed
        except (BadInput, BadCapture):
            return False

    def record_path(self, key: str) -> Path:
        return self.root / RECORDS / f"{key}.json"

    def _samples_path(self, key: str) -> Path:
        return self.root / SAMPLES / f"{key}.safetensors"

    def clear(self) -> None:
        """Remove all outcomes, so that the next run computes them anew; files of others stay."""
        for folder in (self.root / RECORDS, self.root / SAMPLES, self.root / CLOCK, self.root):
            for path in folder.iterdir() if folder.is_dir() else ():
                if STORED_NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files of others are in it, or it is not there
                folder.rmdir()

    def clock(self, key: str) -> Clock:
        """How long a trial took; zero where nothing says."""
        clock: dict[str, Any] = {}
        with contextlib.suppress(BadInput):
            clock = read_json(self.root / CLOCK / f"{key}.json")
        seconds, factor, memory_share, attack = (_positive(clock.get(name)) for name in Clock._fields)
        return Clock(seconds or 0.0, factor, memory_share or 1.0, attack)

    def samples(self, key: str) -> dict[str, Tensor] | None:
        """Samples of the trial in pixels, images as bytes; None where none were kept.

        `recovered` and, where the truth is known, `originals` in the same order, `answered` and `indices` in the batch;
        from the closest to the farthest.
        """
        path = self._samples_path(key)
        if not path.is_file():
            return None
        file = TensorFile(path)
        return {name: file[name] for name in file}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a full disk into a sentence."""
        try:
            yield
        except OSError as error:
            raise BadInput(
                f"'{self.root}' cannot be written ({error.strerror or error}). Earlier results are intact: "
                "make room, then continue with --resume."
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A table in a JSON file of an audit, which may come from anywhere."""
    try:
        if not path.is_file():  # a pipe would never end
            raise ValueError("no such file")
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError("too large")
        table = json.loads(path.read_bytes(), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # without the path a second time
        raise BadInput(f"no audit in {shown(str(path.parent))}: {path.name}: {reason}.") from error
    if not isinstance(table, dict):
        raise BadInput(f"{shown(path.name)} does not hold a table. Run the audit again.")
    return table


def _no_number(word: str) -> float:
    """Infinities are written as words in quotes, so that every reader accepts them."""
    raise ValueError(f"{word} is no number of JSON")


def _positive(value: Any) -> float | None:
    """A number that a clock can have shown."""
    return value if isinstance(value, float) and 0 <= value < math.inf else None
