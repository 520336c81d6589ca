"""Reads the pickles of the CIFAR downloads without running anything that is in them.

A pickle reaches code through `find_class` alone. Here that returns one class that keeps what it is given and does
nothing, or refuses; not even numpy's own constructors are called.
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

NEEDED = frozenset(
    {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    }
)
"""What a pickled array refers to; `_codecs.encode` is how Python 3 writes bytes for Python 2."""


class _Inert:
    """Stands in for everything NEEDED."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in NEEDED:
            raise pickle.UnpicklingError(f"a reference to {module}.{name}")
        return _Inert


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle; byte arrays in it become numpy arrays."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise pickle.UnpicklingError(f"more than {MOST_BYTES} bytes")
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
        return {key: _pixels(value) if isinstance(value, _Inert) else value for key, value in content.items()}
    except Exception as error:  # a broken pickle raises nearly anything, and each means the same
        problem = str(error) if isinstance(error, pickle.UnpicklingError) else "a damaged file"
        raise BadInput(
            f"{path} is not a CIFAR pickle of byte arrays, lists and text: it holds {problem}. Nothing in "
            "it was run. Fetch the binary version of the data set instead."
        ) from error


def _pixels(array: _Inert) -> Pixels:
    """The array whose pickled state was kept: (version, shape, dtype, column order, raw bytes)."""
    _, shape, dtype, column_order, raw = array.state
    text = raw.arguments[0] if isinstance(raw, _Inert) else raw
    data = text.encode("latin1") if isinstance(text, str) else text
    if not isinstance(data, bytes) or dtype.arguments[0] != "u1" or math.prod(shape) != len(data):
        raise pickle.UnpicklingError("an array that is not of bytes")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if column_order else "C")
