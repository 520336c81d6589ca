"""How much memory gradient matching needs for a large batch, whole and in parts, and what an iteration costs.

    python benchmarks/matching_memory.py [--device cuda] [--batches 256 512] [--gib 0 64 16] [--iterations 4]

VGG-16 at 224 pixels with its classifier of 25088-4096-4096-1000 units, cross-entropy, known labels. Each line is a
batch and the memory that the attack may use; 0 leaves that to the attack. On a GPU the peak is what PyTorch had
allocated at once, on a CPU the resident set of a process of its own. Seconds an iteration are those of the later
iterations: the time of a run less that of a shorter one. Writes benchmarks/results/matching_memory.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "src"))

from workloads.base import pictures, settle  # noqa: E402

import fedprism as fp  # noqa: E402
from fedprism.attacks import Engine, GradientMatching, Labels, TotalVariation  # noqa: E402
from fedprism.runtime import devices  # noqa: E402

GIB = 2**30
FEW = 4
"""Iterations of the shorter run: three before a graph is captured, and the first that is replayed."""


def measure(
    network: str, batch: int, side: int, gib: float, iterations: int, *, tf32: bool, device: torch.device
) -> dict[str, object]:
    place = str(device)
    model = fp.models.build(network, seed=0, **({"classes": 1000} if network == "vgg16" else {"classes": 10}))
    client = fp.Batch(pictures(batch, side, torch.device("cpu")), torch.arange(batch) % 10)
    scenario = fp.Scenario(model=model, clients=[client], training=False)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), device=place)
    row: dict[str, object] = {"network": network, "batch": batch, "side": side, "allowed GiB": gib, "tf32": tf32}
    seconds = {}
    for count in (FEW, FEW + iterations):
        attack = GradientMatching(
            labels=Labels.KNOWN,
            priors=(TotalVariation(1e-4),),
            iterations=count,
            engine=Engine(tf32=tf32, memory=int(gib * GIB) or None),
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        settle(device)
        start = time.perf_counter()
        found = fp.run(attack, observation, device=place)
        settle(device)
        seconds[count] = time.perf_counter() - start
        row |= {"status": found.status, "stepping": found.diagnostics["stepping"]}
    row["seconds an iteration"] = (seconds[FEW + iterations] - seconds[FEW]) / iterations
    row["objective"] = found.diagnostics["objective"]
    row["peak GiB"] = _peak(device)
    return row


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--network", default="vgg16", choices=["vgg16", "resnet18"])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--gib", nargs="+", type=float, default=[64.0, 16.0])
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--alone", action="store_true", help="one line, in this process, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "matching_memory.json")
    options = parser.parse_args()
    device = devices.pick(options.device)
    if options.alone:
        (batch,), (gib,) = options.batches, options.gib
        sizes = options.network, batch, options.side, gib, options.iterations
        print(json.dumps(measure(*sizes, tf32=options.tf32, device=device)))
        return
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    rows: list[dict[str, object]] = []
    for batch in options.batches:
        for gib in options.gib:
            rows.append(_in_a_process_of_its_own(options, batch, gib, str(device)))
            print(json.dumps(rows[-1]), flush=True)
            told = {"device": place, "torch": torch.__version__, "rows": rows}
            options.output.write_text(json.dumps(told, indent=1) + "\n")


def _in_a_process_of_its_own(options: argparse.Namespace, batch: int, gib: float, device: str) -> dict[str, object]:
    """So that a line's memory is its own, and one that runs out of it does not end the others."""
    call = [sys.executable, __file__, "--alone", "--device", device, "--network", options.network]
    call += ["--side", str(options.side), "--batches", str(batch), "--gib", str(gib)]
    call += ["--iterations", str(options.iterations), *(["--tf32"] if options.tf32 else [])]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"network": options.network, "batch": batch, "side": options.side, "allowed GiB": gib, "failed": last}
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
