"""Reads a truth folder of either kind: written whole by a simulation, or batch by batch by the clients of a run."""

from __future__ import annotations

import os
from pathlib import Path

from fedprism.errors import BadInput
from fedprism.truth.kept import is_kept, kept_truth
from fedprism.truth.whole import FILE, Truth, whole_truth
from fedprism.types import Observation


def load_truth(folder: str | os.PathLike[str], observation: Observation | None = None) -> Truth:
    """Read and check what `save_truth` wrote, or what clients kept with `keep_truth`.

    observation: the recording whose updates the batches that clients kept are put beside.
    """
    path = Path(folder)
    if (path / FILE).is_file():
        return whole_truth(path)
    if not is_kept(path):
        raise BadInput(
            f"'{path.name}' has no {FILE} and no batches that clients kept. Give a folder with ground truth."
        )
    if observation is None:
        raise BadInput(
            f"the batches in '{path.name}' belong to a capture. Give it, too: load_truth(folder, observation)."
        )
    return kept_truth(path, observation)
