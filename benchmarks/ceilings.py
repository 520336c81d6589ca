"""Whether any attack comes closer than the ceiling, and ceilings beside what attacks reach.

    python benchmarks/ceilings.py law [--quick] [--first 0 --cells 500] [--data-dir DATA]
    python benchmarks/ceilings.py table     what was stored of `law`, as research/ceilings.md has it
    python benchmarks/ceilings.py curves [--quick] [--only noise] [--chart research/ceilings.svg] [--data-dir DATA]

`law`: in each cell (network, defense, strength, batch, sample) the private sample is drawn several times from the
cube that its ceiling speaks of, and attacked by methods of ours and by one that is told the cube. Where a mean over few
samples is above the ceiling, further samples decide. `curves`: ceilings of photographs by noise, batch size and
pruning, and the best attack on the same photographs. Without a data folder, embedded photographs. Adds to
benchmarks/results/ceilings.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import local_update
from fedprism.evaluation.channel import channel
from fedprism.losses import cross_entropy
from fedprism.randomness import generator
from fedprism.solvers.bounds.cube import Cube
from fedprism_papers.shared.charts import line_chart

SERVER = fp.threats.honest_but_curious
RESULTS = Path(__file__).parent / "results" / "ceilings.json"
SMALL, LARGE = 8, 32
"""Sides, in pixels, of the pictures for the law and for the curves."""
DRAWS = 3
"""Private samples drawn from each cube."""
MORE_DRAWS = 40
"""Further samples, if the mean over the first ones is above the ceiling, which holds for the mean over all samples."""
OURS = ("dense-inversion", "inverting-gradients")
"""Attacks of fedprism; the others are told the cube."""
DIGITS = 3
"""Of a decibel, in what is stored."""
ITERATIONS = {"law": 25, "curves": 600}
"""Steps of the attack by gradient matching."""
INFORMED_STEPS, INFORMED_RATE = 40, 0.2
"""Of the attacker who is told the cube: enough to converge on these networks."""
STRIDE = 97
"""Between the settings of one cell and the next, so that the first cells are of every kind; a prime number."""
NOISES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Relative to the root mean square of the update."""
RATIOS = (0.0, 0.5, 0.9, 0.99)
BATCHES = (1, 2, 4, 8)
EVERY_NOISE = (1e-3, 1e-2, 1e-1, 1.0, 10.0)

Defended = Callable[[float, float], fp.defenses.Defense]
DEFENSES: dict[str, Defended] = {
    "gaussian": lambda noise, norm: fp.defenses.GaussianNoise(noise),
    "laplace": lambda noise, norm: fp.defenses.LaplaceNoise(noise),
    "prune-noise": lambda noise, norm: fp.chain(fp.defenses.Prune(0.8), fp.defenses.GaussianNoise(noise)),
    "noise-prune": lambda noise, norm: fp.chain(fp.defenses.GaussianNoise(noise), fp.defenses.Prune(0.8)),
    "clip-noise": lambda noise, norm: fp.chain(fp.defenses.Clip(norm / 2), fp.defenses.GaussianNoise(noise / 2)),
    "dp-sgd": lambda noise, norm: fp.defenses.DpSgd(2 * noise / norm, norm / 2),
}


def data(side: int, folder: str | None) -> fp.data.ImageSet:
    if folder is None:
        return fp.data.load("photos", size=side)
    return fp.data.load("cifar10", data_dir=folder, size=side, limit=2000)


def network(kind: str, side: int, classes: int, seed: int) -> nn.Module:
    shape = (3, side, side)
    if kind == "dense":
        return fp.models.build("fc2", input_shape=shape, hidden=24, classes=classes, seed=seed)
    activation, _, width = kind.partition("-")
    return fp.models.build(
        "lenet", input_shape=shape, classes=classes, activation=activation, width=int(width or 12), seed=seed
    )


NETWORKS = ("dense", "relu-4", "sigmoid-4", "tanh-4")


def replaced(scenario: fp.Scenario, cube: Cube, sample: Tensor) -> fp.Scenario:
    """The scenario with its first sample, in pixels from 0 to 1, replaced."""
    held = scenario.clients[0]
    inputs = held.inputs.clone()
    inputs[0] = sample.view(inputs.shape[1:])
    return dataclasses.replace(scenario, clients=[fp.Batch(inputs, held.labels)])


def size_of_update(scenario: fp.Scenario) -> tuple[float, float]:
    """Root mean square of an entry, and length."""
    plain = dataclasses.replace(scenario, defense=fp.chain())
    update = fp.simulate(plain, SERVER, seed=0, device="cpu")[0].round.update
    flat = torch.cat([tensor.flatten() for tensor in update.values()])
    return float(flat.square().mean().sqrt()), float(flat.norm())


def informed(scenario: fp.Scenario, observation: fp.Observation, cube: Cube) -> Tensor:
    """The first sample as found by an attacker who is told the cube, the labels and every other sample."""
    held, signs = scenario.clients[0], torch.zeros(cube.center.numel(), requires_grad=True)
    defense = scenario.defense.deterministic(observation.round.update)
    source = channel(scenario, SERVER, 0, 0, 0)
    optimizer = torch.optim.Adam([signs], lr=INFORMED_RATE)

    def sample() -> Tensor:
        return (cube.center + cube.basis.combine(torch.tanh(signs) * cube.steps / 2)).clamp(0, 1)

    for _ in range(INFORMED_STEPS):
        inputs = torch.cat([sample().view(1, *held.inputs.shape[1:]), held.inputs[1:]])
        update = local_update(
            scenario.model, dict(scenario.model.named_parameters()), fp.Batch(inputs, held.labels), loss=cross_entropy,
            protocol=scenario.protocol, rng=generator(0, "informed"), defense=defense, create_graph=True,
        ).update  # fmt: skip
        misfit = sum(
            ((update[k] - v) / source.deviations[0]).square().sum() for k, v in observation.round.update.items()
        )
        # A sample from the cube has signs of variance 1: without this the noise would be fitted.
        (step,) = torch.autograd.grad((misfit + signs.tanh().square().sum()) / 2, signs)
        signs.grad = step
        optimizer.step()
    return sample().detach()


def errors(scenario: fp.Scenario, cube: Cube, seed: int, iterations: int) -> dict[str, float]:
    """Mean squared error of each attack's answer for the first sample."""
    observation, truth = fp.simulate(scenario, SERVER, seed=seed, device="cpu")
    pixels = truth.inputs[0].flatten().clamp(0, 1)
    values = {
        "centre of the cube": float((cube.center - pixels).square().mean()),
        "informed": float((informed(scenario, observation, cube) - pixels).square().mean()),
    }
    matching = dataclasses.replace(fp.attacks.inverting_gradients(), iterations=iterations)
    for name, attack in (("dense-inversion", fp.attacks.dense_inversion()), ("inverting-gradients", matching)):
        try:
            scores = fp.score(fp.run(attack, observation, seed=seed, device="cpu"), truth, metrics=["mse"])
        except fp.NotApplicable:
            continue
        if scores.values["mse"][0] is not None:
            values[name] = scores.values["mse"][0]
    return values


def law_cell(index: int, images: fp.data.ImageSet) -> dict[str, Any]:
    """One cell: its ceiling, and the PSNR of each attack's mean error over samples drawn from the cube."""
    grid = list(itertools.product(NETWORKS, DEFENSES, NOISES, (1, 3)))
    kind, defended, noise, size = grid[index * STRIDE % len(grid)]
    seed = index // len(grid)
    batch = images.draw(size, generator(index, "batch"))
    plain = fp.Scenario(model=network(kind, SMALL, images.classes, seed), clients=[batch])
    rms, norm = size_of_update(plain)
    scenario = dataclasses.replace(plain, defense=DEFENSES[defended](noise * rms, norm))
    begin = time.perf_counter()
    ceiling = fp.ceiling(scenario, SERVER, seed=index)
    seconds = time.perf_counter() - begin
    cube = ceiling.cubes[0]

    def floors(draws: range) -> dict[str, float]:
        """PSNR of each attack's mean error over these samples."""
        totals = dict[str, list[float]]()
        for draw in draws:
            sample = cube.draw(generator(index, "draw", draw))
            for name, value in errors(replaced(scenario, cube, sample), cube, draw, ITERATIONS["law"]).items():
                totals.setdefault(name, []).append(value)
        return {name: round(decibels(statistics.fmean(values)), DIGITS) for name, values in totals.items()}

    first = floors(range(DRAWS))
    row = {
        "cell": [kind, defended, noise, size, seed], "ceiling": round(ceiling.values[0], DIGITS), "floors": first,
        "seconds": round(seconds, DIGITS),
    }  # fmt: skip
    if max(first.values()) > ceiling.values[0]:
        row["further floors"] = floors(range(DRAWS, DRAWS + MORE_DRAWS))
    return row


def decibels(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf


def law(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    images = data(SMALL, args.data_dir)
    for index in range(args.first, args.first + (8 if args.quick else args.cells)):
        yield {"index": index, **law_cell(index, images)}


def curves(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ceilings and floors of photographs: over noise, over batch sizes, over pruning before noise."""
    images = data(LARGE, args.data_dir)
    noises = EVERY_NOISE[::2] if args.quick else EVERY_NOISE
    rows = {
        "noise": [(kind, noise, 1, 0.0) for kind in ("relu", "sigmoid") for noise in noises],
        "batch": [("relu", noise, size, 0.0) for noise in (0.1, 1.0) for size in BATCHES],
        "pruning": [("relu", noise, 1, ratio) for noise in (0.1, 1.0) for ratio in RATIOS],
    }
    for part in args.only:
        for kind, noise, size, ratio in rows[part]:
            plain = fp.Scenario(
                model=network(kind, LARGE, images.classes, 0), clients=[images.draw(size, generator(0, "curves"))]
            )
            rms, _ = size_of_update(plain)
            hidden = fp.defenses.GaussianNoise(noise * rms)
            defense = fp.chain(fp.defenses.Prune(ratio), hidden) if ratio else hidden
            scenario = dataclasses.replace(plain, defense=defense)
            begin = time.perf_counter()
            ceiling = fp.ceiling(scenario, SERVER, seed=0)
            middle = time.perf_counter()
            matching = dataclasses.replace(fp.attacks.inverting_gradients(), iterations=ITERATIONS["curves"])
            observation, truth = fp.simulate(scenario, SERVER, seed=0, device="cpu")
            scores = fp.score(fp.run(matching, observation, seed=0, device="cpu"), truth, metrics=["psnr"])
            floor = max(value for value in scores.values["psnr"] if value is not None)
            yield {
                "part": part, "network": kind, "noise": noise, "batch": size, "ratio": ratio,
                "ceiling": max(ceiling.values), "floor": floor, "seconds": middle - begin,
                "attack_seconds": time.perf_counter() - middle,
            }  # fmt: skip


def chart(rows: list[dict[str, Any]]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "noise":
            for what, label in (("ceiling", "ceiling"), ("floor", "best attack")):
                lines.setdefault(f"{row['network']}: {label}", []).append((row["noise"], row[what]))
    return line_chart(lines, x="noise / root mean square of the update", y="PSNR (dB)", log_x=True)


def table(rows: list[dict[str, Any]]) -> str:
    """How far below their ceilings attacks stay, by what cells have in common."""
    groups = {"all": rows}
    for place, what in enumerate(("network", "defense", "noise", "batch")):
        for value in dict.fromkeys(sorted(row["cell"][place] for row in rows)):
            groups[f"{what} {value}"] = [row for row in rows if row["cell"][place] == value]
    few, more = f"above after {DRAWS} samples", f"after {MORE_DRAWS} further ones"
    lines = [
        f"| cells | number | attacks of fedprism: least, median | told the cube: least, median | {few} | {more} |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        ours = [margin(row, row["floors"], among=OURS) for row in group]
        told = [margin(row, row.get("further floors", row["floors"])) for row in group]
        first = sum(margin(row, row["floors"]) < 0 for row in group)
        lines.append(
            f"| {name} | {len(group)} | {min(ours):.1f}, {statistics.median(ours):.1f} dB | {min(told):.1f}, "
            f"{statistics.median(told):.1f} dB | {first} | {sum(each < 0 for each in told)} |"
        )
    return "\n".join(lines)


def margin(row: dict[str, Any], floors: dict[str, float], among: tuple[str, ...] | None = None) -> float:
    """By how many decibels the best of these attacks stays below the ceiling."""
    values = [value for name, value in floors.items() if among is None or name in among]
    return row["ceiling"] - max(values, default=-math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["law", "table", "curves"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--only", nargs="+", default=["noise", "batch", "pruning"])
    parser.add_argument("--data-dir", default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    stored = json.loads(args.output.read_text()) if args.output.exists() else {}
    what = "law" if args.what == "table" else args.what
    rows = stored.setdefault(f"{what}, {'photographs' if args.data_dir is None else 'CIFAR-10'}", [])
    if args.what == "table":
        print(table(rows))
        return
    for row in (law if args.what == "law" else curves)(args):
        print(json.dumps(row), flush=True)
        same = ("index",) if args.what == "law" else ("part", "network", "noise", "batch", "ratio")
        rows[:] = [old for old in rows if any(old[name] != row[name] for name in same)] + [row]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(stored, indent=1) + "\n")
    if args.what == "law":
        print(table(rows))
    elif args.chart is not None:
        args.chart.write_text(chart(rows))


if __name__ == "__main__":
    main()
