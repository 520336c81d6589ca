"""Tensor files: read lazily and checked, written whole or not at all. Nothing in them is ever executed."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import BadCapture

MOST_FILE_BYTES = 2**32
"""Bytes of one file: 4 GiB, a bound on what a hostile capture may have read."""
MOST_TENSORS = 2**16
"""Tensors of one file, a bound on the header of a hostile capture."""
CHUNK = 2**22
"""Values looked at in one go: 32 MiB in double precision, so that checking a file needs little memory."""
MOST_REASON = 200
"""Characters of another library's error message that are passed on."""

_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_FLOAT = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**_WHOLE, **_FLOAT, "BOOL": torch.bool}
STORED_TYPES = frozenset(_DTYPES.values())
"""Types of tensors that a file may hold."""


class TensorFile(Mapping[str, Tensor]):
    """A read-only view of a safetensors file: a tensor is read when it is asked for, and not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = shown(path.name)
        """The file's name as error messages write it."""
        try:
            size = path.stat().st_size
            if size > MOST_FILE_BYTES:
                raise BadCapture(
                    f"{self.name} has {size} bytes; the limit is {MOST_FILE_BYTES}. Record fewer tensors in it."
                )
            file: Any = safe_open(str(path), framework="pt")
            names: list[str] = file.keys()
            if len(names) > MOST_TENSORS:
                raise BadCapture(
                    f"{self.name} holds {len(names)} tensors; the limit is {MOST_TENSORS}. Record fewer tensors in it."
                )
            self._entries: dict[str, Any] = {name: file.get_slice(name) for name in names}
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise BadCapture(
                f"{self.name} is not a safetensors file ({_first_line(error)}). Write it again."
            ) from error
        self._file = file
        self._stored = {name: name for name in names}
        for name in self:
            self.dtype(name)
            if math.prod(self.shape(name)) == 0:
                raise BadCapture(f"{shown(name)} in {self.name} is empty. Leave it out.")

    def __getitem__(self, name: str) -> Tensor:
        # A copy: the file's own memory may lie at odd addresses, and whoever changed it would change later readings.
        return self._mapped(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as the header states it, without reading the tensor."""
        return tuple(self._entries[name].get_shape())

    def rename(self, names: Mapping[str, str]) -> None:
        """From now on, call each tensor by another name; `names` maps every one that is in use."""
        self._entries = {names[name]: entry for name, entry in self._entries.items()}
        self._stored = {names[name]: stored for name, stored in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype as the header states it; one that fedprism does not work with is a BadCapture."""
        stated = self._entries[name].get_dtype()
        if stated not in _DTYPES:
            raise BadCapture(
                f"{shown(name)} in {self.name} is of type {stated}; tensors must be {', '.join(_DTYPES)}. Convert it."
            )
        return _DTYPES[stated]

    def check_finite(self, *, nan_allowed: Collection[str] = ()) -> None:
        """Read every floating-point tensor once; infinity, or NaN where it is not allowed, is a BadCapture."""
        for name in self:
            if not self.dtype(name).is_floating_point:
                continue
            for values in torch.split(self._mapped(name).view(-1), CHUNK):
                bad = values.isinf() if name in nan_allowed else ~values.isfinite()
                if bool(bad.any()):
                    raise BadCapture(
                        f"{shown(name)} in {self.name} holds NaN or infinity. Leave that round out or record it again."
                    )

    def _mapped(self, name: str) -> Tensor:
        """The tensor in the file's own memory."""
        if name not in self._entries:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(self._stored[name])
        return tensor


class Selection(Mapping[str, Tensor]):
    """Some of the tensors of a mapping, read as lazily as the mapping itself."""

    def __init__(self, whole: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._whole = whole
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


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
    return (str(error).splitlines() or [type(error).__name__])[0][:MOST_REASON]
