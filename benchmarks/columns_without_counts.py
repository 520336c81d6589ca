"""Participation and updates from sums alone, without any count: how many users come back, and how many false ones.

    python benchmarks/columns_without_counts.py --users 40 --rates 0.05 0.1 0.2 0.3 0.4 0.5 --rounds-a-user 2 3 4 6
    python benchmarks/columns_without_counts.py --rates 0.1 0.3 --rounds-a-user 4 6 --noise 0.3 1 --parameters 3000
    python benchmarks/columns_without_counts.py --fedavg 1.0 0.9 --users 30 --rates 0.1 --rounds-a-user 10 --trials 1

Found: columns that the solver calls found, of the users; false: those of them that are no user's. `--fedavg FRACTION`
trains LeNet on CIFAR-10 instead of planting updates: 64 images a user, batches of 16, 4 epochs, and each user trains on
that fraction of its images in a round.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fedprism as fp
from fedprism.pixels import to_inputs
from fedprism.randomness import generator
from fedprism.solvers import UserStatus, recover_participation
from fedprism_papers.disaggregation.federation import CENTRED, dealt_out
from fedprism_papers.disaggregation.planted_participation import Federation, is_among, plant

FOUND = frozenset({UserStatus.UNNAMED, UserStatus.SOLVED, UserStatus.CERTIFIED, UserStatus.GIVEN})
IMAGES = 64
"""Of each user, as in the paper's table 1."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    users: int
    rounds: int
    rate: float
    noise: float
    parameters: int
    fraction: float | None
    """Part of its images that a user trains on in a round; None: updates are planted."""
    known_users: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1])
    parser.add_argument("--rounds-a-user", type=float, nargs="+", default=[4.0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--fedavg", type=float, nargs="+", default=[None], metavar="FRACTION")
    parser.add_argument("--tell-users", action="store_true", help="the solver is told how many users there are")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    for rate, a_user, noise, fraction in product(options.rates, options.rounds_a_user, options.noise, options.fedavg):
        cell = Cell(
            users=options.users,
            rounds=round(a_user * options.users),
            rate=rate,
            noise=noise,
            parameters=options.parameters,
            fraction=fraction,
            known_users=options.tell_users,
        )
        print(json.dumps(measure(cell, options.trials)), flush=True)


def measure(cell: Cell, trials: int) -> dict[str, Any]:
    found, false, seconds, guessed, statuses = list[int](), list[int](), list[float](), list[int](), set[str]()
    for trial in range(trials):
        sums, matrix = trained(cell, trial) if cell.fraction is not None else planted(cell, trial)
        start = time.process_time()
        answer = recover_participation(sums, users=cell.users if cell.known_users else None)
        seconds.append(round(time.process_time() - start, 1))
        real = is_among(answer.matrix.T, matrix.T)
        called = torch.tensor([status in FOUND for status in answer.statuses], dtype=torch.bool)
        found.append(int((called & real).sum()))
        false.append(int((called & ~real).sum()))
        guessed.append(int(real.sum()))
        statuses.add(answer.status.name)
    return {**vars(cell), "found": found, "false": false, "right": guessed, "cpu seconds": seconds} | {
        "status": sorted(statuses)
    }


def planted(cell: Cell, trial: int) -> tuple[Tensor, Tensor]:
    federation = Federation(
        users=cell.users, rounds=cell.rounds, rate=cell.rate, noise=cell.noise, parameters=cell.parameters
    )
    made = plant(federation, generator(trial, "without counts"), torch.device("cpu"))
    return made.sums, made.matrix


def trained(cell: Cell, trial: int) -> tuple[Tensor, Tensor]:
    data = fp.data.load("cifar10", split="test")
    drawn = data.draw(cell.users * IMAGES, generator(trial, "users"))
    scenario = fp.Scenario(
        model=fp.models.build("lenet5", input_shape=(3, 32, 32), classes=10, seed=trial),
        clients=dealt_out(fp.Batch(to_inputs(drawn.tensor, CENTRED), drawn.labels), IMAGES),
        protocol=fp.FedAvg(lr=0.01, epochs=4, batch_size=16),
        aggregation="sum",
        normalization=CENTRED,
        rounds=cell.rounds,
        participation=cell.rate,
        frozen=True,
        fraction=cell.fraction or 1.0,
    )
    observed, truth = fp.simulate(scenario, fp.threats.secure_aggregation, seed=trial)
    assert truth.participation is not None
    rows = [torch.cat([tensor.flatten() for tensor in round.update.values()]) for round in observed.rounds]
    return torch.stack(rows), truth.participation


if __name__ == "__main__":
    main()
