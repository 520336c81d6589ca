"""Tensor files: read lazily and checked, written whole or not at all. Nothing in them is ever executed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism.errors import BadCapture

_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_FLOAT = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**_WHOLE, **_FLOAT, "BOOL": torch.bool}


class TensorFile(Mapping[str, Tensor]):
    """A read-only view of a safetensors file: a tensor is read when it is asked for, and not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(str(path), framework="pt")
            self._entries = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise BadCapture(
                f"expected a safetensors file, found '{path.name}' that cannot be read as one "
                f"({_first_line(error)}); write it again."
            ) from error
        for name in self._entries:
            self.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._entries:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as the header states it, without reading the tensor."""
        return tuple(self._entries[name].get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype as the header states it; one that fedprism does not work with is a BadCapture."""
        stated = self._entries[name].get_dtype()
        if stated not in _DTYPES:
            raise BadCapture(
                f"expected tensors of type {', '.join(_DTYPES)}, found {stated} for '{name}' in '{self.path.name}'; "
                "convert it."
            )
        return _DTYPES[stated]

    def check_finite(self) -> None:
        """Read every floating-point tensor once; NaN or infinity is a BadCapture."""
        for name in self:
            if self.dtype(name).is_floating_point and not bool(torch.isfinite(self[name]).all()):
                raise BadCapture(
                    f"expected finite numbers, found NaN or infinity in '{name}' of '{self.path.name}'; "
                    "leave that round out or record it again."
                )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file in one step: a reader sees the whole file or none."""
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, save(contiguous))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: to a neighbour first, then renamed over it."""
    handle, neighbour = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(neighbour, 0o644)
        os.replace(neighbour, path)
    except BaseException:
        Path(neighbour).unlink(missing_ok=True)
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
