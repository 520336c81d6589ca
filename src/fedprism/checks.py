"""Checks of values that come from a person, a plan or a hostile capture: pass the value on or raise one sentence."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fedprism.errors import BadInput
from fedprism.naming import nearest

T = TypeVar("T")

_REPR = reprlib.Repr()
_REPR.maxstring = 80  # long enough for the names of parameters

MOST_LENGTH = 65536
"""Of one dimension of a shape that a file states: no model of the table needs a longer one."""
MOST_ELEMENTS = 2**28
"""Of such a shape in all: 1 GiB of single precision."""


def shown(value: object) -> str:
    """A value as a short text for an error message, whatever its size."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write whole numbers beyond 4300 digits
        return f"an oversized {type(value).__name__}"


def whole(value: object, name: str, most: int, least: int = 1) -> int:
    """`value` if it is a whole number from `least` to `most`; True is not one."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadInput(f"{name} must be a whole number from {least} to {most}, not {shown(value)}.")
    return value


def probability(value: object, name: str) -> float:
    """`value` as a float if it is a number from 0 up to, but not including, 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise BadInput(f"{name} must be a number from 0 up to, but not including, 1, not {shown(value)}.")
    return float(value)


def choice(value: object, name: str, options: Iterable[str]) -> str:
    """`value` if it is one of the words `options`."""
    options = tuple(options)
    if not isinstance(value, str) or value not in options:
        raise BadInput(f"{name} must be {' or '.join(options)}, not {shown(value)}.")
    return value


def shape(value: object, name: str, lengths: Sequence[int] = (1, 2, 3, 4)) -> list[int]:
    """`value` as a list if it is the shape of one input; `lengths` says how many sizes it may have."""
    if not isinstance(value, list | tuple) or len(value) not in lengths:
        wanted = " or ".join(map(str, lengths))
        raise BadInput(f"{name} must be a list of {wanted} whole numbers, not {shown(value)}.")
    sizes = [whole(size, f"each number in {name}", MOST_LENGTH) for size in value]
    if math.prod(sizes) > MOST_ELEMENTS:
        raise BadInput(f"{name} {shown(sizes)} holds {math.prod(sizes)} values; the limit is {MOST_ELEMENTS}.")
    return sizes


def row(table: Mapping[str, T], name: object, kind: str) -> T:
    """The row of a table of methods, or an error that names the nearest rows."""
    if not isinstance(name, str) or name not in table:
        hint = nearest(name, table) if isinstance(name, str) else f"use one of {', '.join(table)}."
        raise BadInput(f"no {kind} is called {shown(name)}; {hint}")
    return table[name]


def arguments(function: Callable[..., Any], given: Mapping[str, object], owner: str) -> dict[str, Any]:
    """`given` completed with the defaults of `function`, once every name is known and none is missing."""
    parameters = inspect.signature(function).parameters
    accepted = ", ".join(parameters)
    for name in given:
        if name not in parameters:
            raise BadInput(f"{owner} has no option {shown(name)}. Its options are {accepted}.")
    missing = [name for name, known in parameters.items() if known.default is known.empty and name not in given]
    if missing:
        raise BadInput(f"{owner} needs {' and '.join(missing)}. Add {missing[0]}=....")
    return {name: given.get(name, known.default) for name, known in parameters.items()}
