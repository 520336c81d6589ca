"""The ground truth of a simulation. Only `simulation` and `scoring` import this module, and a test enforces it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.tensors import TensorFile, write_bytes

FILE = "truth.safetensors"

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The private samples behind an observation, one row each, and whose they are.

    inputs (samples, *input_shape) in the model's input space; `bounds` and `normalization` turn them into pixels.
    """

    inputs: Tensor
    labels: Tensor
    owners: tuple[str, ...]
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None


class _About(BaseModel):
    """What lies beside the tensors, in the file's metadata."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["fedprism-truth/1"]
    owners: tuple[str, ...]
    bounds: tuple[Finite, Finite]
    normalization: tuple[tuple[Finite, ...], tuple[Finite, ...]] | None


def save_truth(truth: Truth, folder: str | os.PathLike[str]) -> Path:
    """Write the truth into a folder of its own, never into a capture's."""
    target = Path(folder)
    if (target / "capture.json").exists():
        raise BadInput(
            f"expected a folder of its own for the truth, found the capture '{target.name}'; choose another."
        )
    about = _About(
        format="fedprism-truth/1", owners=truth.owners, bounds=truth.bounds, normalization=truth.normalization
    )
    tensors = {"inputs": truth.inputs.cpu().contiguous(), "labels": truth.labels.cpu().contiguous()}
    target.mkdir(parents=True, exist_ok=True)
    write_bytes(target / FILE, save(tensors, {"about": about.model_dump_json()}))
    return target


def load_truth(folder: str | os.PathLike[str]) -> Truth:
    """Read and check what `save_truth` wrote."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise BadInput(
            f"expected a folder with a {FILE}, found none in '{Path(folder).name}'; point at a truth folder."
        )
    file = TensorFile(path)
    file.check_finite()
    try:
        with safe_open(str(path), framework="pt") as opened:
            about = _About.model_validate_json((opened.metadata() or {}).get("about", ""))
    except ValidationError as error:
        raise BadInput(f"expected the truth's own description in {FILE}, found another; write it again.") from error
    if set(file) != {"inputs", "labels"} or not len(file["inputs"]) == len(file["labels"]) == len(about.owners):
        raise BadInput(f"expected as many inputs as labels and owners in {FILE}, found otherwise; write it again.")
    return Truth(
        inputs=file["inputs"],
        labels=file["labels"],
        owners=about.owners,
        bounds=about.bounds,
        normalization=about.normalization,
    )
