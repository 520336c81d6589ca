"""Tasks for executors. Nothing heavy is imported here: every process that a test starts imports this file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is\nnegative")
    return number * number


def mischief(task: str) -> Any:
    """Whatever can go wrong in a process, by name."""
    if task == "raise":
        raise RuntimeError("planned")
    if task == "gpu":
        raise RuntimeError("CUDA error: unknown error")
    if task == "who":
        return os.getpid()
    if task == "exit":
        os._exit(3)
    if task == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "unpicklable":
        return lambda: None
    if task == "sleep":
        time.sleep(600)
    return task


def leave_a_mark_and_sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def leave_a_mark_and_wait(path: str) -> None:
    """Until there is a file called "go on" beside it."""
    Path(path).write_text(str(os.getpid()))
    while not Path(path).with_name("go on").exists():
        time.sleep(0.01)


def threads(_: int) -> tuple[int, str | None]:
    import torch

    return torch.get_num_threads(), os.environ.get("OPENBLAS_NUM_THREADS")
