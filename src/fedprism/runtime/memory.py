"""How large blocks of work are: as usual, or a fraction of it where memory has run out.

Whatever works in blocks asks `together` for their size. Answers agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class MemoryLimit:
    """The fraction of the usual amount to work on at a time, and whether it could be less."""

    fraction: float
    divisible: bool = False
    """Whether any block still holds several items."""


_limit: ContextVar[MemoryLimit | None] = ContextVar("fedprism_memory_limit", default=None)


@contextmanager
def limited_to(fraction: float) -> Iterator[MemoryLimit]:
    """Inside the block, work on this fraction of the usual amount at a time."""
    if not 0 < fraction <= 1:
        raise ValueError(f"the share of memory must be above 0 and at most 1, not {fraction}. 1 is the usual amount.")
    limit = MemoryLimit(fraction)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


def is_limited() -> bool:
    """Whether less than usual is to be worked on at a time."""
    limit = _limit.get()
    return limit is not None and limit.fraction < 1


def together(usual: int) -> int:
    """How many to work on at a time instead of `usual`; at least one."""
    limit = _limit.get()
    if limit is None:
        return max(1, usual)
    size = max(1, int(usual * limit.fraction))
    limit.divisible = limit.divisible or size > 1
    return size
