"""What clients trained on, kept by themselves while a run is recorded: a file per batch, apart from the capture."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.files.strict import Strict
from fedprism.files.tensors import TensorFile, write_bytes
from fedprism.inputs import by_name, first_tensor, from_names, joined, shape_of, tensors_of
from fedprism.truth.whole import Truth
from fedprism.types import Batch, Observation

log = logging.getLogger("fedprism")

PIXELS = (0.0, 1.0)
"""Bounds of inputs that nobody states."""
LETTERS = 16
"""Of the digest that stands for a client in a file's name: a client's own name may be anything."""
OWNER_ONLY = 0o700
"""Who may look into the folder."""


class _About(Strict):
    """What lies beside the tensors, in the file's metadata."""

    format: Literal["fedprism-kept-truth/1"]
    client: Annotated[str, Field(max_length=1000)]
    round: int


def keep_truth(folder: str | os.PathLike[str], batch: Batch, *, client: str, round: int) -> Path:
    """Keep a batch that a client trains on in a round, so that an audit of the recorded run can be scored.

    For federations of test data: the folder holds private samples as they are. Take a new folder for each run, keep
    each sample once per round, and name the client as the recording does. A folder inside a capture is refused.
    """
    target = Path(folder).absolute()
    if any((parent / "capture.json").exists() for parent in (target, *target.parents)):
        raise BadInput(f"'{target.name}' is in a capture; the ground truth needs a folder of its own. Choose another.")
    if not len(batch):
        raise BadInput("the batch to keep is empty. Leave it out.")
    target.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    about = _About(format="fedprism-kept-truth/1", client=client, round=round)
    tensors = {**by_name(batch.inputs), "labels": batch.labels}
    # Copies: safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path = next(path for path in _paths(target, client, round) if not path.exists())
    write_bytes(path, save(copies, {"about": about.model_dump_json()}))
    return path


def is_kept(folder: Path) -> bool:
    """Whether clients kept batches in this folder."""
    return folder.is_dir() and any(folder.glob("kept-*.safetensors"))


def kept_truth(folder: Path, observation: Observation) -> Truth:
    """The batches behind the updates of a recording, in their order; of clients that kept none there is nothing.

    Where updates are sums, a sample that a client holds in several rounds is there once.
    """
    batches, owners = list[Batch](), list[str]()
    for seen in observation.rounds:
        for place, client in enumerate(seen.participants or ()):
            parts = [_read(path, client, seen.index) for path in _written(folder, client, seen.index)]
            size = sum(map(len, parts))
            if parts and seen.examples is not None and seen.examples[place] != size:
                log.warning(
                    "%s kept %d samples in round %d and says that it trained on %d: keep each sample once per round, "
                    "in a new folder for each run",
                    *(client, size, seen.index, seen.examples[place]),
                )
            batches += parts
            owners += [client] * size
    if not batches:
        raise BadInput(
            f"'{folder.name}' holds no batch of the capture's clients and rounds. Give the folder of the same run, "
            "with clients named as in the capture."
        )
    if len({(shape_of(batch.inputs), batch.labels.shape[1:]) for batch in batches}) > 1:
        raise BadInput(f"batches in '{folder.name}' differ in shape. Keep what the model is fed.")
    whole = Batch(joined(batch.inputs for batch in batches), torch.cat([batch.labels for batch in batches]))
    if any(seen.clients > 1 for seen in observation.rounds):
        once = _different(whole, owners)
        whole, owners = whole[once], [owners[place] for place in once]
    known = observation.knowledge
    return Truth(
        inputs=whole.inputs,
        labels=whole.labels,
        owners=tuple(owners),
        bounds=known.bounds or PIXELS,
        normalization=known.normalization,
    )


def _paths(folder: Path, client: str, round: int) -> Iterator[Path]:
    """Where the batches of a client and round lie, one after the other."""
    digest = hashlib.sha256(client.encode()).hexdigest()[:LETTERS]
    return (folder / f"kept-{round}-{digest}-{number}.safetensors" for number in count())


def _written(folder: Path, client: str, round: int) -> Iterator[Path]:
    for path in _paths(folder, client, round):
        if not path.is_file():
            return
        yield path


def _read(path: Path, client: str, round: int) -> Batch:
    file = TensorFile(path)
    file.check_finite()
    try:
        with safe_open(str(path), framework="pt") as opened:
            about = _About.model_validate_json((opened.metadata() or {}).get("about", ""))
    except ValidationError as error:
        raise BadInput(f"{path.name} does not hold a batch as clients keep it. Remove it.") from error
    inputs = from_names({name: file[name] for name in file if name.split(".")[0] == "inputs"})
    read = {"labels", *(by_name(inputs) if inputs is not None else ())}
    if inputs is None or set(file) != read or (about.client, about.round) != (client, round):
        raise BadInput(f"{path.name} must hold inputs and labels of its client and round alone. Remove it.")
    labels = file["labels"]
    if any(tensor.dim() == 0 or len(tensor) != len(labels) for tensor in tensors_of(inputs)):
        raise BadInput(f"{path.name} needs as many inputs as labels. Remove it.")
    return Batch(inputs, labels)


def _different(batch: Batch, owners: Sequence[str]) -> list[int]:
    """The places of samples that are not the same as an earlier one of the same owner."""
    known: dict[tuple[str, bytes], int] = {}
    for place in range(len(first_tensor(batch.inputs))):
        sample = b"".join(_bytes(tensor[place]) for tensor in (*tensors_of(batch.inputs), batch.labels))
        known.setdefault((owners[place], sample), place)
    return list(known.values())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
