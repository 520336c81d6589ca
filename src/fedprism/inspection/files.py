"""The files that `fedprism inspect` reads: safetensors, hostile until checked, never unpickled."""

from __future__ import annotations

from pathlib import Path

import torch

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.files.tensors import TensorFile
from fedprism.types import Batch, is_soft


def tensors(path: Path) -> TensorFile:
    """The tensors of a safetensors file, read when they are asked for."""
    if not path.is_file():
        raise BadInput(f"{shown(str(path))}: no such file.")
    return TensorFile(path)


def batch(path: Path) -> Batch:
    """The client's own samples: a file that holds `inputs` and `labels`."""
    file = tensors(path)
    missing = next((name for name in ("inputs", "labels") if name not in file), None)
    if missing is not None:
        raise BadInput(f"{file.name} has no '{missing}'. Save 'inputs' and 'labels'.")
    inputs, labels = file["inputs"], file["labels"]
    if not inputs.dtype.is_floating_point or not bool(torch.isfinite(inputs).all()):
        raise BadInput(f"inputs in {file.name} must be finite floating-point numbers. Save what the model is fed.")
    if not inputs.dim() or not labels.dim() or len(inputs) != len(labels):
        raise BadInput(f"{file.name} needs as many labels as inputs.")
    return Batch(inputs, labels if is_soft(labels) else labels.long())
