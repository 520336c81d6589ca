"""Reads the pickles of the CIFAR downloads without running anything that is in them.

A pickle is a program: it may import any function and call it. The one door through which it reaches code is
`find_class`, and here that door opens only to the three inert classes below, whatever name the file asks for. They
keep what they are given and do nothing else; not even numpy's own constructors are called. Once reading is over, the
array is made from the recorded bytes under our own checks.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedprism.data.pictures import Pixels
from fedprism.data.source import MOST_BYTES
from fedprism.errors import BadInput


class _Dtype:
    """Stands in for numpy.dtype: the code is kept, the rest (alignment, byte order) does not matter for bytes."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, _: object) -> None:
        pass


class _Array:
    """Stands in for numpy.ndarray and for the function that makes an empty one."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Latin1(bytes):
    """Stands in for _codecs.encode, which is how Python 3 writes bytes into a pickle that Python 2 can read."""

    def __new__(cls, text: str, _: str) -> _Latin1:
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, _: object) -> None:
        pass


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"a reference to {module}.{name}")
        return _STAND_INS[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle; byte arrays in it become numpy arrays."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise pickle.UnpicklingError(f"more than {MOST_BYTES} bytes")
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"a {type(content).__name__}")
        return {key: _pixels(value) if isinstance(value, _Array) else value for key, value in content.items()}
    except Exception as error:  # a broken pickle raises nearly anything, and each means the same
        found = str(error) if isinstance(error, pickle.UnpicklingError) else "a damaged file"
        raise BadInput(
            f"expected a CIFAR pickle of byte arrays, lists and text in {path}, found {found}; nothing in it was run, "
            "fetch the binary version of the data set instead."
        ) from error


def _pixels(array: _Array) -> Pixels:
    """The array whose pickled state was recorded: (version, shape, dtype, column order, raw bytes)."""
    if not isinstance(array.state, tuple) or len(array.state) != 5:
        raise pickle.UnpicklingError("an array of an unknown kind")
    _, shape, dtype, column_order, raw = array.state
    data = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(data, bytes) or dtype.code != "u1" or math.prod(shape) != len(data):
        raise pickle.UnpicklingError("an array that is not of bytes")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if column_order else "C")
