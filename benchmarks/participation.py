"""Recovering participation: all users at once beside one integer program a user, on the same planted sums.

    python benchmarks/participation.py --users 64 128 256 512 1024 --columns 3 -o benchmarks/results/participation.json
    python benchmarks/participation.py --users 50 --rounds 20000 --parameters 1000 --noise 0.3 --columns 0 --trials 1
    python benchmarks/participation.py --users 16384 --columns 0 --trials 1 --device cuda    # 139 GiB of GPU memory

The integer programs are what one would run instead of the paper's Gurobi ones: HiGHS, one thread, one program a user.
They are run for a sample of the users, up to a time limit each, and the time for all users is extrapolated from it;
where the limit was reached, the true ratio is larger.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism.solvers import recover_participation
from fedprism_papers.disaggregation.planted_participation import Federation, Planted, plant, program_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds-a-user", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=None, help="instead of so many for each user")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation per user and round, of updates' 1")
    parser.add_argument("--no-counts", action="store_true", help="columns are found without counts or names")
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--columns", type=int, default=3, help="users whose integer program is solved")
    parser.add_argument("--column-limit", type=float, default=60.0, help="seconds for one of them")
    parser.add_argument("--device", default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    device = devices.pick(options.device)
    rows = [measure(users, options, device) for users in options.users]
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    result = {"device": place, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(users: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rounds = options.rounds or round(options.rounds_a_user * users)
    federation = Federation(users=users, rounds=rounds, parameters=options.parameters, noise=options.noise)
    recover_participation(*_seen(plant(Federation(users=16, rounds=48), generator(0), device), options))  # warm
    seconds, proving, exact, certified = [], [], 0, 0.0
    for trial in range(options.trials):
        planted = plant(federation, generator(trial, "benchmark", users), device)
        start = _now(device)
        found = recover_participation(*_seen(planted, options), users=users, certify=False)
        seconds.append(_now(device) - start)
        exact += torch.equal(_in_order(found.matrix, options), _in_order(planted.matrix, options))
        start = _now(device)
        proved = recover_participation(*_seen(planted, options), users=users, time_limit=0.0)
        proving.append(_now(device) - start)
        certified += float(proved.certified.float().mean()) / options.trials
        for user in proved.certified.nonzero()[:, 0].tolist():
            assert torch.equal(proved.matrix[:, user].cpu(), planted.matrix[:, user]), "a wrong column is certified"
    each = [program_seconds(planted, user, options.column_limit) for user in range(options.columns)]
    extrapolated = users * sum(each) / len(each) if each else None
    row = {
        "users": users,
        "rounds": federation.rounds,
        "parameters": federation.parameters,
        "noise": federation.noise,
        "counts": not options.no_counts,
        "trials exact": f"{exact} of {options.trials}",
        "seconds": sorted(seconds)[len(seconds) // 2],
        "seconds with proofs by duality": sorted(proving)[len(proving) // 2],
        "share certified": certified,
        "integer programs run": len(each),
        "seconds of an integer program": each,
        "at the limit": sum(s >= options.column_limit for s in each),
        "seconds of all integer programs, extrapolated": extrapolated,
        "ratio": extrapolated / sorted(seconds)[len(seconds) // 2] if extrapolated else None,
    }
    print(json.dumps(row), flush=True)
    return row


def _seen(planted: Planted, options: argparse.Namespace) -> tuple[Any, ...]:
    return (planted.sums,) if options.no_counts else (planted.sums, planted.windows, planted.counts)


def _in_order(matrix: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """The columns as they are, or, where they have no names, in the order of their entries."""
    return torch.unique(matrix.cpu(), dim=1) if options.no_counts else matrix.cpu()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
