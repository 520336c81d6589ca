"""How large blocks of work are: as usual, or a fraction of it where memory has run out.

Whatever works in blocks asks `together` for their size. Answers agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class MemoryShare:
    """The fraction of the usual amount to work on at a time, and whether it could be less."""

    fraction: float
    divisible: bool = False
    """Whether any block still holds several items."""


_share: ContextVar[MemoryShare | None] = ContextVar("fedprism_memory_share", default=None)


@contextmanager
def taking(fraction: float) -> Iterator[MemoryShare]:
    """Inside the block, work on this fraction of the usual amount at a time."""
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a share above 0 and at most 1, found {fraction}; 1 is the usual amount.")
    share = MemoryShare(fraction)
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def splits() -> bool:
    """Whether less than usual is to be worked on at a time."""
    share = _share.get()
    return share is not None and share.fraction < 1


def together(usual: int) -> int:
    """How many to work on at a time instead of `usual`; at least one."""
    share = _share.get()
    if share is None:
        return max(1, usual)
    size = max(1, int(usual * share.fraction))
    share.divisible = share.divisible or size > 1
    return size
