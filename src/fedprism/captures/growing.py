"""A capture that grows while a run is going on: after every round it is whole and can be loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedprism.captures.schema import MANIFEST, MOST_MANIFEST_BYTES, parse
from fedprism.captures.writing import manifest_of, round_entry
from fedprism.errors import BadCapture, FedprismError
from fedprism.files.tensors import write_bytes, write_tensors
from fedprism.types import Knowledge, Observation, Round, Update, same_tensors


class CaptureFull(FedprismError):
    """No further round goes into this capture."""


class Sent(NamedTuple):
    """The model that the last round was of."""

    params: Update
    buffers_before: Update | None


class GrowingCapture:
    """Writes rounds as they come, and keeps none of them in memory but the last model that was sent.

    If the folder exists already, the next free one of folder-2, folder-3, ... is taken. A run that is killed leaves a
    capture of the rounds before. If `knowledge` gives no batch size, the numbers of examples that clients stated are
    written instead.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        knowledge: Knowledge | None = None,
        source: str = "",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.model = model
        self.knowledge = knowledge or Knowledge()
        self.source = source
        self.bytes = 0
        """What its tensor files take on the disk."""
        self._claimed = False
        self._manifest: dict[str, Any] | None = None
        self._sizes: list[int | None] = []
        self._last: Sent | None = None

    def claim(self) -> Path:
        """Make the folder, or the first numbered one that nobody has; later calls return the same one."""
        if self._claimed:
            return self.folder
        wanted = self.folder
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                self.folder, self._claimed = folder, True
                break
        return self.folder

    def append(self, rounds: Sequence[Round]) -> str:
        """Add one round's updates, or raise `CaptureFull`; returns the name of the file that holds their model."""
        self.claim()
        written: list[Path] = []
        try:
            return self._append(rounds, written)
        except BaseException:
            for path in written:  # files that no manifest names would only take room
                path.unlink(missing_ok=True)
            raise

    def _append(self, rounds: Sequence[Round], written: list[Path]) -> str:
        sizes = [*self._sizes, *(sum(r.examples) if r.examples is not None else None for r in rounds)]
        manifest, last, rest = self._manifest, self._last, rounds
        if manifest is None:
            first, *rest = rounds
            files: dict[str, Update] = {}
            observation = Observation(model=self.model, rounds=(first,), knowledge=self.knowledge, source=self.source)
            manifest = json.loads(manifest_of(observation, files))
            for name, tensors in files.items():
                self._write(name, tensors, written)
            last = Sent(first.params, first.buffers_before)
        entries = list(manifest["rounds"])
        for round_ in rest:
            entries.append(self._entry(round_, len(entries), entries[-1], last, written))
            last = Sent(round_.params, round_.buffers_before)
        text = self._described({**manifest, "rounds": entries}, sizes)
        if len(text) > MOST_MANIFEST_BYTES:
            raise CaptureFull(
                f"{MANIFEST} exceeds {MOST_MANIFEST_BYTES} bytes after {len(entries)} updates. Record the "
                "rest of the run in another folder."
            )
        write_bytes(self.folder / MANIFEST, text)
        self._manifest, self._sizes, self._last = {**manifest, "rounds": entries}, sizes, last
        self.bytes += sum(path.stat().st_size for path in written)
        return str(entries[-1]["params"])

    def _write(self, name: str, tensors: Update, written: list[Path]) -> None:
        written.append(self.folder / name)
        write_tensors(self.folder / name, tensors)

    def _entry(
        self, round_: Round, number: int, before: Mapping[str, Any], last: Sent | None, written: list[Path]
    ) -> dict[str, Any]:
        """The manifest's entry of a round; a model that the entry before names already is not written again."""

        def file_of(field: str, name: str, tensors: Update) -> str:
            if field in before and same_tensors(tensors, getattr(last, field, None)):
                return str(before[field])
            self._write(name, tensors, written)
            return name

        return round_entry(round_, number, file_of)

    def _described(self, manifest: dict[str, Any], sizes: Sequence[int | None]) -> bytes:
        """The text of the manifest, with the batch sizes where they are all known and can be computed with."""
        if self.knowledge.batch_size is None and all(sizes):
            knowledge = {**manifest["knowledge"], "batch_size": sizes}
            text = json.dumps({**manifest, "knowledge": knowledge}, indent=1).encode()
            with suppress(BadCapture):  # a client may have more samples than may be computed with
                parse(text)
                return text
        text = json.dumps(manifest, indent=1).encode()
        parse(text)
        return text
