"""A capture that grows while a run is going on: after every round it is whole and can be loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedprism.checks import shown
from fedprism.errors import BadCapture, BadInput, FedprismError
from fedprism.schema import MANIFEST, MOST_MANIFEST_BYTES, parse
from fedprism.tensors import write_bytes, write_tensors
from fedprism.types import Knowledge, Observation, Round, Update
from fedprism.writing import save


class CaptureFull(FedprismError):
    """No further round goes into this capture."""


class Sent(NamedTuple):
    """The model that the last round was of."""

    params: Update
    buffers_before: Update | None


class GrowingCapture:
    """Writes rounds as they come, and keeps none of them in memory but the last model that was sent.

    The folder is made with the first round. Tensors are written before the manifest that names them, so a run that is
    killed leaves a capture of the rounds before. Where `knowledge` gives no batch size, the numbers of examples that
    clients stated stand in for it.
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
        if os.path.lexists(self.folder):
            raise BadInput(
                f"expected a new folder for the capture, found that {shown(self.folder.name)} exists; "
                "choose another name."
            )
        self.model = model
        self.knowledge = knowledge or Knowledge()
        self.source = source
        self._manifest: dict[str, Any] | None = None
        self._sizes: list[int | None] = []
        self._last: Sent | None = None

    def append(self, rounds: Sequence[Round]) -> str:
        """Add what was seen of one round; the name of the file that holds the model it was of.

        Raises `CaptureFull` where a reader would refuse the manifest for its length; the capture stays as it was.
        """
        entries = list(self._manifest["rounds"]) if self._manifest is not None else []
        last = self._last
        sizes = [*self._sizes, *(sum(seen.examples) if seen.examples is not None else None for seen in rounds)]
        for seen in rounds:
            if self._manifest is None:
                first = Observation(model=self.model, rounds=(seen,), knowledge=self.knowledge, source=self.source)
                save(first, self.folder)
                self._manifest = json.loads((self.folder / MANIFEST).read_text())
                entries = list(self._manifest["rounds"])
            else:
                entries.append(self._entry(seen, len(entries), entries[-1], last))
            last = Sent(seen.params, seen.buffers_before)
        assert self._manifest is not None
        text = self._described({**self._manifest, "rounds": entries}, sizes)
        if len(text) > MOST_MANIFEST_BYTES:
            raise CaptureFull(
                f"expected a {MANIFEST} of at most {MOST_MANIFEST_BYTES} bytes, found more after {len(entries)} "
                "updates; record the rest of the run in another folder."
            )
        write_bytes(self.folder / MANIFEST, text)
        self._manifest["rounds"], self._sizes, self._last = entries, sizes, last
        name: str = entries[-1]["params"]
        return name

    def _entry(self, seen: Round, number: int, before: Mapping[str, Any], last: Sent | None) -> dict[str, Any]:
        """What the manifest says of a round; a model that the entry before names already is not written again."""
        entry: dict[str, Any] = {
            "index": seen.index,
            "kind": seen.kind,
            "reduction": seen.reduction,
            "clients": seen.clients,
        }
        for name in ("participants", "examples"):
            if getattr(seen, name) is not None:
                entry[name] = list(getattr(seen, name))
        for name in ("params", "update", "buffers_before", "buffers_after"):
            tensors = getattr(seen, name)
            if tensors is None:
                continue
            if name in before and same(tensors, getattr(last, name, None)):
                entry[name] = before[name]
                continue
            entry[name] = f"{name.replace('_', '-')}-{number}.safetensors"
            write_tensors(self.folder / entry[name], tensors)
        return entry

    def _described(self, manifest: dict[str, Any], sizes: Sequence[int | None]) -> bytes:
        """The text of the manifest, with the batch sizes where they are all known and can be computed with."""
        if self.knowledge.batch_size is None and all(sizes):
            knowledge = {**manifest["knowledge"], "batch_size": sizes}
            text = json.dumps({**manifest, "knowledge": knowledge}, indent=1).encode()
            try:
                parse(text)
                return text
            except BadCapture:
                pass  # a client with more samples than may be computed with
        text = json.dumps(manifest, indent=1).encode()
        parse(text)
        return text


def same(first: Update, second: Update | None) -> bool:
    """Whether two mappings hold the same numbers; the same object does without a look at them."""
    if first is second or second is None:
        return first is second
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
