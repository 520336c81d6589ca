"""Every headline workload, ours beside what one would run instead, on the same input in the same run, as one table.

    python benchmarks/bench.py [--device cuda] [--data-dir DATA] [--only NAME ...] [--threads 2]
                               [--peer-path FOLDER]    # breaching and what it needs lie in FOLDER

`make bench` and `make bench-gpu` call it. Ratios compare; seconds belong to the machine. Where the other would take too
long, a part of it is run and multiplied up, and the table says so. Writes benchmarks/results/bench-cpu.json or
bench-gpu.json and the same as Markdown, after a look at the ratios that were there before: one that has fallen by a
third is warned about.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "src"))

from workloads import WORKLOADS, load  # noqa: E402
from workloads.base import Clock, Comparison, Conditions, as_row, from_row, matrix_rate  # noqa: E402

from fedprism.errors import FedprismError  # noqa: E402
from fedprism.runtime import devices  # noqa: E402

FALLEN = 2 / 3
"""A ratio below this part of the stored one is warned about: machines are noisy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), help="the other rows of the table stay")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--processor", action="store_true", help="processor seconds, where others use the machine")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with breaching installed")
    parser.add_argument("--peer-path", default=None, help="folder with breaching and what it needs")
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    Clock.processor = options.processor
    device = devices.pick(options.device)
    folder = Path(options.data_dir) if options.data_dir else None
    if folder is None:
        print("No data folder (--data-dir or FEDPRISM_DATA): the embedded photographs stand in; LPIPS may be missing.")
    peer = ("env", f"BREACHING={options.peer_path or ''}", options.peer_python)
    wanted = options.peer_path or options.peer_python != sys.executable
    conditions = Conditions(device=device, data_dir=folder, peer=peer if wanted else None)
    output = options.output or HERE / "results" / f"bench-{'gpu' if device.type == 'cuda' else 'cpu'}.json"
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    stored = {_key(row): row["ratio"] for row in rows}
    kept = {_key(row): from_row(row) for row in rows} if options.only else {}
    found: list[Comparison] = []
    for name in options.only or WORKLOADS:
        began = time.perf_counter()
        try:
            for comparison in load(name)(conditions):
                found.append(comparison)
                print(line(comparison), flush=True)
                kept[_key(as_row(comparison))] = comparison
                _save(output, list(kept.values()), device)
        except (ImportError, FedprismError) as error:  # a package, or data that is not in the folder
            print(f"{name} left out: {error}", flush=True)
        print(f"{name} took {time.perf_counter() - began:.0f} s, both sides and what they were given", flush=True)
    for warning in [*fallen(found, stored), *missing(kept.values(), stored)]:
        print(warning)


def line(comparison: Comparison) -> str:
    c = comparison
    told = [
        c.workload,
        c.size,
        _seconds(c.ours),
        c.quality or "–",
        c.other,
        f"{'about ' if c.extrapolated else ''}{_seconds(c.theirs)}",
        c.their_quality or "–",
        f"{c.ratio:,.0f} x" if c.ratio >= 10 else f"{c.ratio:.1f} x",
        "–" if c.share_of_limit is None else f"{100 * c.share_of_limit:.2g}%",
        c.note,
    ]
    return "| " + " | ".join(told) + " |"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.2g} s"


def markdown(found: Sequence[Comparison]) -> str:
    columns = (
        "workload",
        "size",
        "ours",
        "quality",
        "instead",
        "its time",
        "its quality",
        "faster",
        "of limit",
        "note",
    )
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *map(line, found)]) + "\n"


def fallen(found: Sequence[Comparison], stored: dict[str, float]) -> list[str]:
    """A sentence for every ratio that has fallen by a third since it was stored."""
    return [
        f"warning: {_key(as_row(c))} is {c.ratio:.3g} x faster, and was {stored[_key(as_row(c))]:.3g} x when stored"
        for c in found
        if c.ratio < FALLEN * stored.get(_key(as_row(c)), 0.0)
    ]


def missing(kept: Iterable[Comparison], stored: dict[str, float]) -> list[str]:
    """A sentence for every row that was stored and is not in the table any more."""
    there = {_key(as_row(comparison)) for comparison in kept}
    return [f"warning: {key} was stored and has not been measured" for key in stored if key not in there]


def _key(row: dict[str, object]) -> str:
    return f"{row['workload']}, {row['size']}, {row['other']}"


def _save(output: Path, found: Sequence[Comparison], device: torch.device) -> None:
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    described = {
        "device": place,
        "threads": torch.get_num_threads(),
        "seconds": "of the processor" if Clock.processor else "by the clock",
        "torch": torch.__version__,
        "matrix products, operations a second": matrix_rate(device),
        "rows": [as_row(comparison) for comparison in found],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(described, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    try:
        main()
    except FedprismError as error:
        raise SystemExit(str(error)) from None
