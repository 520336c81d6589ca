"""The ground truth of a simulation, written whole. Only rooms below the wall import it, and a test enforces that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism.display.words import ShortRepr
from fedprism.errors import BadInput
from fedprism.files.strict import Strict
from fedprism.files.tensors import TensorFile, write_bytes
from fedprism.inputs import Inputs, by_name, from_names, single_tensor, tensors_of
from fedprism.types import Update

FILE = "truth.safetensors"

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Truth(ShortRepr):
    """The private samples behind an observation, one row each, and whose they are.

    inputs in the model's input space and structure, each tensor (samples, ...); `bounds` and `normalization` turn one
    tensor of floating-point numbers into pixels.
    Where clients are seen one by one and the model changes, a sample is listed for each update it is behind; else, or
    where the attacker is told which samples were mixed, once.

    participation (rounds, clients) bool says who took part. Where only aggregates are seen, of one round or of a model
    that stays as it is, `updates` has what each client contributed, the mean over its rounds, None if it had none.
    """

    inputs: Inputs
    labels: Tensor
    owners: tuple[str, ...]
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    participation: Tensor | None = None
    updates: tuple[Update | None, ...] | None = None

    @property
    def tensor(self) -> Tensor:
        """The inputs of a model that is fed one tensor."""
        return single_tensor(self.inputs)


class _About(Strict):
    """What lies beside the tensors, in the file's metadata."""

    format: Literal["fedprism-truth/1"]
    owners: tuple[str, ...]
    bounds: tuple[Finite, Finite]
    normalization: tuple[tuple[Finite, ...], tuple[Finite, ...]] | None
    updates: Annotated[int, Field(ge=0, le=2**20)] | None = None
    """How many clients `updates` speaks of; those who sent none have no tensors."""


def save_truth(truth: Truth, folder: str | os.PathLike[str]) -> Path:
    """Write the truth into a folder of its own, never into a capture's."""
    target = Path(folder)
    if (target / "capture.json").exists():
        raise BadInput(f"'{target.name}' is a capture; the ground truth needs a folder of its own. Choose another.")
    about = _About(
        format="fedprism-truth/1",
        owners=truth.owners,
        bounds=truth.bounds,
        normalization=truth.normalization,
        updates=None if truth.updates is None else len(truth.updates),
    )
    tensors = {**by_name(truth.inputs), "labels": truth.labels}
    if truth.participation is not None:
        tensors["participation"] = truth.participation
    for number, update in enumerate(truth.updates or ()):
        tensors.update({f"updates.{number}.{name}": tensor for name, tensor in (update or {}).items()})
    # Copies: safetensors refuses tensors that share memory, and clients may send one and the same.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    target.mkdir(parents=True, exist_ok=True)
    write_bytes(target / FILE, save(copies, {"about": about.model_dump_json()}))
    return target


def whole_truth(folder: Path) -> Truth:
    """Read and check what `save_truth` wrote."""
    path = folder / FILE
    if not path.is_file():
        raise BadInput(f"'{folder.name}' has no {FILE}. Give a folder with ground truth.")
    file = TensorFile(path)
    file.check_finite()
    try:
        with safe_open(str(path), framework="pt") as opened:
            about = _About.model_validate_json((opened.metadata() or {}).get("about", ""))
    except ValidationError as error:
        raise BadInput(f"{FILE} does not hold a ground truth as fedprism writes it.") from error
    extras = {name for name in file if name == "participation" or name.startswith("updates.")}
    inputs = from_names({name: file[name] for name in file if name.split(".")[0] == "inputs"})
    read = {"labels", *(by_name(inputs) if inputs is not None else ())}
    if inputs is None or set(file) - extras != read or not _as_many(inputs, file["labels"], len(about.owners)):
        raise BadInput(f"{FILE} needs as many inputs as labels and owners.")
    return Truth(
        inputs=inputs,
        labels=file["labels"],
        owners=about.owners,
        bounds=about.bounds,
        normalization=about.normalization,
        participation=_participation(file),
        updates=None if about.updates is None else _updates(file, about.updates),
    )


def _as_many(inputs: Inputs, labels: Tensor, count: int) -> bool:
    """Whether every tensor holds so many samples."""
    return all(tensor.dim() > 0 and len(tensor) == count for tensor in (*tensors_of(inputs), labels))


def _participation(file: TensorFile) -> Tensor | None:
    if "participation" not in file:
        return None
    if file.dtype("participation") != torch.bool or len(file.shape("participation")) != 2:
        raise BadInput(f"participation in {FILE} must be (rounds, clients) of bool.")
    return file["participation"]


def _updates(file: TensorFile, clients: int) -> tuple[Update | None, ...]:
    """The tensors `updates.CLIENT.NAME`, by client."""
    updates: list[dict[str, Tensor]] = [{} for _ in range(clients)]
    for key in file:
        field, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        if field != "updates":
            continue
        if not number.isdecimal() or int(number) >= clients:
            raise BadInput(f"{FILE} must hold the updates of {clients} clients.")
        updates[int(number)][name] = file[key]
    return tuple(update or None for update in updates)
