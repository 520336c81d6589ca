"""The workloads of `benchmarks/bench.py`, one file each: ours beside what one would run instead, on the same input.

A workload is imported when its turn comes, so that a machine without what one of them needs still measures the others.
Gradient matching comes last: where packages are missing that it can do without, it puts stand-ins in their place.
"""

from __future__ import annotations

import importlib

from workloads.base import Workload

WORKLOADS = {
    "start-up": "starting",
    "scoring": "scoring",
    "decoding": "decoding",
    "report": "reporting",
    "trials": "trials",
    "separation": "separation",
    "participation": "participation",
    "matching": "matching",
}
"""The name on the command line, and the module whose function of the same name is the workload."""


def load(name: str) -> Workload:
    module = WORKLOADS[name]
    found: Workload = getattr(importlib.import_module(f"workloads.{module}"), module)
    return found
