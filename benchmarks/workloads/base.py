"""What a workload says, and the clock."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where and on what to measure. `peer`: the command that runs a program with the peer `breaching` at hand."""

    device: torch.device
    data_dir: Path | None
    peer: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of the table: seconds of ours and of the other on the same input, and how good each answer is.

    `share_of_limit`: what part of the machine's measured rate ours reaches, where operations or bytes can be counted.
    `extrapolated`: the other was run for a part only and its time multiplied up.
    """

    workload: str
    size: str
    ours: float
    other: str
    theirs: float
    quality: str = ""
    their_quality: str = ""
    share_of_limit: float | None = None
    extrapolated: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


Workload: TypeAlias = Callable[[Conditions], Iterator[Comparison]]


class Clock:
    """Seconds by the clock or, with `processor`, of this process and those it has waited for.

    Processor seconds are for a machine that others use, and for one thread: of several threads they are the sum.
    """

    processor = False

    @classmethod
    def now(cls) -> float:
        if not cls.processor:
            return time.perf_counter()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime


def timed(device: torch.device, run: Callable[[], Answer]) -> tuple[float, Answer]:
    """Seconds until the answer is there, on a GPU too. Garbage of what ran before is nobody's time."""
    gc.collect()
    settle(device)
    start = Clock.now()
    answer = run()
    settle(device)
    return Clock.now() - start, answer


def best_of(count: int, device: torch.device, run: Callable[[], Answer]) -> tuple[float, Answer]:
    """The fastest of a few runs: what the machine can do when nothing else disturbs it."""
    runs = [timed(device, run) for _ in range(count)]
    return min(runs, key=lambda one: one[0])


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def matrix_rate(device: torch.device) -> float:
    """Floating-point operations a second of a product of square matrices in single precision: the limit to go by."""
    side = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    _ = a @ b
    seconds, _ = best_of(3, device, lambda: a @ b)
    return 2 * side**3 / seconds


def bandwidth(device: torch.device) -> float:
    """Bytes a second that are read or written when a large tensor is copied."""
    size = 2**30 if device.type == "cuda" else 2**28
    source, copy = (torch.ones(size // 4, device=device) for _ in range(2))
    seconds, _ = best_of(3, device, lambda: copy.copy_(source))
    return 2 * size / seconds


def operations(run: Callable[[], object]) -> int:
    """Floating-point operations of all products and convolutions in a run."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def pictures(count: int, side: int, device: torch.device) -> torch.Tensor:
    """(count, 3, side, side) in [0, 1]: photographs, or made-up smooth pictures where their packages are missing."""
    rng = torch.Generator().manual_seed(0)
    try:
        from fedprism import data

        shown = data.load("photos", size=side, crops=max(1, -(-count // 8))).draw(count, rng).inputs
    except ImportError:
        small = torch.rand(count, 3, 5, 5, generator=rng)
        shown = torch.nn.functional.interpolate(small, size=(side, side), mode="bicubic").clamp(0, 1)
    return shown.to(device)


def as_row(comparison: Comparison) -> dict[str, Any]:
    return {**{name: getattr(comparison, name) for name in Comparison.__dataclass_fields__}, "ratio": comparison.ratio}


def from_row(row: dict[str, Any]) -> Comparison:
    return Comparison(**{name: row[name] for name in Comparison.__dataclass_fields__})
