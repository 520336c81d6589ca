"""JSON of results: numbers that are not finite as words, and the versions that a result depends on."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from typing import Any

import torch

from fedprism import __version__


def as_json(value: object) -> bytes:
    """JSON that every reader accepts: numbers that are not finite become the words "inf", "-inf" and "nan"."""
    return (json.dumps(_plain(value), indent=1, allow_nan=False) + "\n").encode()


def versions() -> dict[str, str]:
    """What a result depends on beside its inputs."""
    return {"fedprism": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def as_number(value: Any) -> Any:
    """The number that one of the words "inf", "-inf" and "nan" stands for; anything else as it is."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def as_numbers(value: Any) -> Any:
    """A value with all that is in it, the words for numbers that are not finite being those numbers."""
    if isinstance(value, Mapping):
        return {name: as_numbers(item) for name, item in value.items()}
    return [as_numbers(item) for item in value] if isinstance(value, list) else as_number(value)
