"""How long `fedprism --help` takes, beside importing PyTorch alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch

from workloads.base import Comparison, Conditions, best_of


def starting(_: Conditions) -> Iterator[Comparison]:
    import typer  # noqa: F401  # without it there is no command line to start

    def seconds(*arguments: str) -> float:
        call = [sys.executable, *arguments]
        return best_of(3, torch.device("cpu"), lambda: subprocess.run(call, check=True, capture_output=True))[0]

    yield Comparison(
        workload="start-up",
        size="--help",
        ours=seconds("-m", "fedprism", "--help"),
        other="import torch",
        theirs=seconds("-c", "import torch"),
    )
