"""How the cost of each solver grows with the batch and with the size of the images, as slopes of log against log.

    python benchmarks/growth.py [--device cuda] [--only NAME ...] [--chart docs/growth.svg]

At a slope of 1 twice as many samples take twice the time. Small sizes are often cheaper to add than that, because a
machine is not busy with them: the table gives the slope over all sizes and that of the last step. On a CPU seconds are
the processor's, so that other work on the machine counts less; on a GPU the clock's. Best of two runs after a warm-up.
Writes benchmarks/results/growth-cpu.json or growth-gpu.json and the chart.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "src"))

from workloads.base import pictures, settle  # noqa: E402

import fedprism as fp  # noqa: E402
from fedprism import devices  # noqa: E402
from fedprism.attacks import Attack, CocktailParty, GradientMatching, Labels, SideBySide  # noqa: E402
from fedprism.attacks.base import joined  # noqa: E402
from fedprism.metrics import ssim_matrix  # noqa: E402
from fedprism.randomness import generator  # noqa: E402
from fedprism.recipes.charts import line_chart  # noqa: E402
from fedprism.recipes.planted_participation import Federation, plant  # noqa: E402
from fedprism.solvers import decode_mixtures, midpoint, recover_participation  # noqa: E402
from fedprism.solvers.windows import Lattice, Smoothest, extremes  # noqa: E402

ITERATIONS = 20
SIDE = 32
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Study:
    """`make(size, device)` prepares a problem and returns what is timed."""

    sizes: tuple[int, ...]
    of: str
    make: Callable[[int, torch.device], Call]
    note: str = ""


def attacked(attack: Attack, model: torch.nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> Call:
    place = str(device)
    threat = fp.threats.honest_but_curious.granting("labels")
    scenario = fp.Scenario(model=model, clients=[fp.Batch(images, labels)])
    observation, _ = fp.simulate(scenario, threat, device=place)
    return lambda: fp.run(attack, observation, device=place)


def dense(size: int, device: torch.device) -> Call:
    model = fp.models.build("dense", input_shape=(3, SIDE, SIDE), classes=200, seed=0)
    images = pictures(size, SIDE, torch.device("cpu"))
    return attacked(fp.attacks.dense_inversion(), model, images, torch.arange(size), device)


def separation(attack: Attack, side: int | None = None) -> Callable[[int, torch.device], Call]:
    """Over the batch or, where `side` is None, over the image's side for a batch of 16."""

    def make(size: int, device: torch.device) -> Call:
        count, pixels = (size, side) if side is not None else (16, size)
        model = fp.models.build("fc2", input_shape=(3, pixels, pixels), hidden=256, classes=10, seed=0)
        images = pictures(count, pixels, torch.device("cpu"))
        return attacked(attack, model, images, torch.arange(count) % 10, device)

    return make


def matching(side: int | None = None) -> Callable[[int, torch.device], Call]:
    def make(size: int, device: torch.device) -> Call:
        count, pixels = (size, side) if side is not None else (1, size)
        model = fp.models.build("lenet", input_shape=(3, pixels, pixels), classes=10, seed=0)
        attack = GradientMatching(labels=Labels.KNOWN, iterations=ITERATIONS)
        images = pictures(count, pixels, torch.device("cpu"))
        return attacked(attack, model, images, torch.arange(count) % 10, device)

    return make


def trials(size: int, device: torch.device) -> Call:
    model = fp.models.build("lenet", input_shape=(3, SIDE, SIDE), classes=10, seed=0)
    threat, place = fp.threats.honest_but_curious.granting("labels"), str(device)
    clients = [fp.Batch(image[None], torch.tensor([0])) for image in pictures(size, SIDE, torch.device("cpu"))]
    seen = [fp.simulate(fp.Scenario(model=model, clients=[one]), threat, device=place)[0] for one in clients]
    together = SideBySide(attack=GradientMatching(labels=Labels.KNOWN, iterations=ITERATIONS))
    everything = joined(seen)
    return lambda: fp.run(together, everything, device=place)


def participation(size: int, device: torch.device) -> Call:
    planted = plant(Federation(users=size, rounds=2 * size, parameters=10_000), generator(0, "growth", size), device)
    return lambda: recover_participation(planted.sums, planted.windows, planted.counts, users=size, certify=False)


def windows(decoder: Callable[[Tensor, Tensor, Lattice], object], side: int) -> Callable[[int, torch.device], Call]:
    def make(size: int, device: torch.device) -> Call:
        lattice = Lattice(top=0, pitch=4, size=32, height=side, width=side)
        maxima, minima = extremes(pictures(size, side, device), lattice, (side // 4, side // 4))
        return lambda: decoder(maxima, minima, lattice)

    return make


def mixtures(size: int, device: torch.device) -> Call:
    rng = torch.Generator().manual_seed(0)
    mapping = torch.rand(4 * size, size, generator=rng).argsort(1)[:, :4]
    weights = torch.rand(4 * size, 4, generator=rng)
    images = pictures(size, 16, torch.device("cpu"))
    encodings = torch.einsum("ek,ekchw->echw", weights, images[mapping]).to(device)
    return lambda: decode_mixtures(encodings, mapping.to(device), weights.to(device))


def similarities(size: int, device: torch.device) -> Call:
    images = pictures(size, SIDE, device)
    return lambda: ssim_matrix(images, images)


BATCH, PIXELS = "samples in the batch", "pixels a side"
STUDIES = {
    "dense inversion": Study(sizes=(16, 32, 64, 128), of=BATCH, make=dense),
    "separation": Study(
        sizes=(16, 32, 64, 128), of=BATCH, make=separation(CocktailParty(exact=False, denoise=False), SIDE)
    ),
    "separation, exact": Study(sizes=(16, 32, 64, 128), of=BATCH, make=separation(CocktailParty(), SIDE)),
    "gradient matching": Study(
        sizes=(2, 4, 8, 16, 32, 64), of=BATCH, make=matching(SIDE), note=f"LeNet, {ITERATIONS} iterations"
    ),
    "many trials at once": Study(
        sizes=(1, 4, 16, 64), of="trials", make=trials, note=f"LeNet, {ITERATIONS} iterations"
    ),
    "participation": Study(sizes=(128, 256, 512, 1024), of="users", make=participation, note="twice as many rounds"),
    "MKOR, midpoint": Study(sizes=(1, 4, 16, 64), of=BATCH, make=windows(midpoint, 224)),
    "MKOR, smoothest": Study(sizes=(2, 4, 8, 16, 32), of=BATCH, make=windows(Smoothest(iterations=20), 64)),
    "MixUp decoding": Study(sizes=(32, 64, 128, 256), of=BATCH, make=mixtures, note="four encodings a sample"),
    "SSIM of all pairs": Study(sizes=(32, 64, 128, 256), of="images on each side", make=similarities),
    "gradient matching, by side": Study(sizes=(16, 32, 64), of=PIXELS, make=matching(), note="batch of 1"),
    "separation, exact, by side": Study(
        sizes=(16, 32, 64), of=PIXELS, make=separation(CocktailParty()), note="batch of 16"
    ),
}


def measure(study: Study, device: torch.device) -> Iterator[tuple[int, float]]:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for size in study.sizes:
        call = study.make(size, device)
        call()  # warm
        times = []
        for _ in range(2):
            settle(device)
            start = clock()
            call()
            settle(device)
            times.append(clock() - start)
        yield size, min(times)


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Least squares through the logarithms."""
    x, y = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    middle, level = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--chart", type=Path, default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    device = devices.pick(options.device)
    torch.set_num_threads(1)
    rows = []
    for name in options.only:
        study = STUDIES[name]
        points = list(measure(study, device))
        rows.append(
            {
                "solver": name,
                "of": study.of,
                "note": study.note,
                "points": points,
                "slope": slope(points),
                "last slope": slope(points[-2:]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, one thread"
    output = options.output or HERE / "results" / f"growth-{'gpu' if device.type == 'cuda' else 'cpu'}.json"
    output.write_text(json.dumps({"device": place, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    if options.chart is not None:
        curves = {str(row["solver"]): row["points"] for row in rows if row["of"] == BATCH}
        options.chart.write_text(line_chart(curves, x=BATCH, y="seconds", log_x=True, log_y=True))


if __name__ == "__main__":
    main()
