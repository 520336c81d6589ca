"""How much is worked on at a time: all that usually is, or a share of it where memory has run out.

Whatever works in blocks asks `together` how large they are. Blocks change the order in which sums are added up and the
algorithms that libraries choose for a size, and nothing else: answers agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Share:
    """Which part of the usual amount is worked on at a time, and whether it could be less."""

    part: float
    divisible: bool = False
    """Whether something that was asked for is still worked on several at a time."""


_share: ContextVar[Share | None] = ContextVar("fedprism_memory_share", default=None)


@contextmanager
def taking(part: float) -> Iterator[Share]:
    """Inside the block, work on this part of the usual amount at a time."""
    if not 0 < part <= 1:
        raise ValueError(f"expected a share above 0 and at most 1, found {part}; 1 is the usual amount.")
    share = Share(part)
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def splits() -> bool:
    """Whether less than usual is to be worked on at a time."""
    share = _share.get()
    return share is not None and share.part < 1


def together(usual: int) -> int:
    """How many to work on at a time instead of `usual`; at least one."""
    share = _share.get()
    if share is None:
        return max(1, usual)
    size = max(1, int(usual * share.part))
    share.divisible = share.divisible or size > 1
    return size
