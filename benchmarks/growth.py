"""How the cost of each solver grows with the batch and with the size of the images, as slopes of log against log.

    python benchmarks/growth.py [--device cuda] [--only NAME ...] [--chart research/growth.svg]

At a slope of 1 twice as many samples take twice the time. Small sizes are often cheaper to add than that, because a
machine is not busy with them: the table gives the slope over all sizes and that of the last step. On a CPU seconds are
the processor's, so that other work on the machine counts less; on a GPU the clock's. Best of two runs after a warm-up.
Writes benchmarks/results/growth-cpu.json or growth-gpu.json, in which rows that were not asked for stay, and the chart,
with another one over the images' side beside it.
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
from typing import TypeAlias

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent / "src"))

from pairwise_metrics import ssim_matrix  # noqa: E402
from workloads.base import pictures, settle  # noqa: E402

import fedprism as fp  # noqa: E402
from fedprism.attacks import (  # noqa: E402
    LBFGS,
    Attack,
    CocktailParty,
    GradientMatching,
    Labels,
    joined,
)
from fedprism.randomness import generator  # noqa: E402
from fedprism.runtime import devices  # noqa: E402
from fedprism.solvers import decode_mixtures, invert_features, label_counts, midpoint, recover_participation  # noqa: E402
from fedprism.solvers.matching.features import FeatureInversion  # noqa: E402
from fedprism.solvers.windows import Lattice, Smoothest, extremes  # noqa: E402
from fedprism_papers.disaggregation.planted_participation import Federation, plant  # noqa: E402
from fedprism_papers.mixing_gradients.side_by_side import SideBySide  # noqa: E402
from fedprism_papers.shared.charts import line_chart  # noqa: E402

ITERATIONS = 20
SIDE = 32
Call: TypeAlias = Callable[[], object]
Make: TypeAlias = Callable[[int, torch.device], Call]
"""Prepares a problem of this size on a device and returns what is timed."""


@dataclass(frozen=True, kw_only=True)
class Study:
    sizes: tuple[int, ...]
    of: str
    make: Make
    note: str = ""


def over(count: int | None, side: int | None, size: int) -> tuple[int, int]:
    """How many images, and their side: the one that is not given is `size`."""
    return count or size, side or size


def attacked(
    attack: Attack, network: str, *, classes: int = 10, count: int | None = None, side: int | None = None, **built: int
) -> Make:
    """The attack on one gradient of the network that `built` describes further; labels are known."""

    def make(size: int, device: torch.device) -> Call:
        number, pixels = over(count, side, size)
        model = fp.models.build(network, input_shape=(3, pixels, pixels), classes=classes, seed=0, **built)
        batch = fp.Batch(pictures(number, pixels, torch.device("cpu")), torch.arange(number) % classes)
        threat, place = fp.threats.honest_but_curious.granting("labels"), str(device)
        observation, _ = fp.simulate(fp.Scenario(model=model, clients=[batch]), threat, device=place)
        return lambda: fp.run(attack, observation, device=place)

    return make


def dense(*, count: int | None = None, side: int | None = None) -> Make:
    return attacked(fp.attacks.dense_inversion(), "dense", classes=200, count=count, side=side)


def separation(attack: Attack, *, count: int | None = None, side: int | None = None) -> Make:
    return attacked(attack, "fc2", hidden=256, count=count, side=side)


def matching(*, count: int | None = None, side: int | None = None) -> Make:
    return attacked(GradientMatching(labels=Labels.KNOWN, iterations=ITERATIONS), "lenet", count=count, side=side)


def features(*, count: int | None = None, side: int | None = None) -> Make:
    def make(size: int, device: torch.device) -> Call:
        number, pixels = over(count, side, size)
        layers = fp.models.build("lenet", input_shape=(3, pixels, pixels), seed=0)[:-1].to(device)  # type: ignore[index]
        target = layers(pictures(number, pixels, device)).detach()
        start, settings = torch.zeros(number, 3, pixels, pixels, device=device), FeatureInversion(iterations=ITERATIONS)
        return lambda: invert_features(layers, target, start, settings=settings)

    return make


def labels(size: int, device: torch.device) -> Call:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: label_counts(gradient, size)


def trials(size: int, device: torch.device) -> Call:
    model = fp.models.build("lenet", input_shape=(3, SIDE, SIDE), classes=10, seed=0)
    threat, place = fp.threats.honest_but_curious.granting("labels"), str(device)
    clients = [fp.Batch(image[None], torch.tensor([0])) for image in pictures(size, SIDE, torch.device("cpu"))]
    seen = [fp.simulate(fp.Scenario(model=model, clients=[one]), threat, device=place)[0] for one in clients]
    together = SideBySide(attack=GradientMatching(labels=Labels.KNOWN, optimizer=LBFGS(inner=1), iterations=ITERATIONS))
    everything = joined(seen)
    return lambda: fp.run(together, everything, device=place)


def participation(size: int, device: torch.device) -> Call:
    planted = plant(Federation(users=size, rounds=2 * size, parameters=10_000), generator(0, "growth", size), device)
    return lambda: recover_participation(planted.sums, planted.windows, planted.counts, users=size, certify=False)


def windows(
    decoder: Callable[[Tensor, Tensor, Lattice], object], *, count: int | None = None, side: int | None = None
) -> Make:
    def make(size: int, device: torch.device) -> Call:
        number, pixels = over(count, side, size)
        lattice = Lattice(top=0, pitch=4, size=32, height=pixels, width=pixels)
        maxima, minima = extremes(pictures(number, pixels, device), lattice, (pixels // 4, pixels // 4))
        return lambda: decoder(maxima, minima, lattice)

    return make


def mixtures(*, count: int | None = None, side: int | None = None) -> Make:
    def make(size: int, device: torch.device) -> Call:
        number, pixels = over(count, side, size)
        rng = torch.Generator().manual_seed(0)
        mapping = torch.rand(4 * number, number, generator=rng).argsort(1)[:, :4]
        weights = torch.rand(4 * number, 4, generator=rng)
        images = pictures(number, pixels, torch.device("cpu"))
        encodings = torch.einsum("ek,ekchw->echw", weights, images[mapping]).to(device)
        return lambda: decode_mixtures(encodings, mapping.to(device), weights.to(device))

    return make


def similarities(*, count: int | None = None, side: int | None = None) -> Make:
    def make(size: int, device: torch.device) -> Call:
        images = pictures(*over(count, side, size), device)
        return lambda: ssim_matrix(images, images)

    return make


BATCH, PIXELS = "samples in the batch", "pixels a side"
LENET = f"LeNet, {ITERATIONS} iterations"
ONE_FIT = Smoothest(iterations=ITERATIONS)
STUDIES = {
    "dense inversion": Study(sizes=(16, 32, 64, 128), of=BATCH, make=dense(side=SIDE)),
    "separation": Study(
        sizes=(16, 32, 64, 128), of=BATCH, make=separation(CocktailParty(exact=False, denoise=False), side=SIDE)
    ),
    "separation, exact": Study(sizes=(16, 32, 64, 128), of=BATCH, make=separation(CocktailParty(), side=SIDE)),
    "gradient matching": Study(sizes=(2, 4, 8, 16, 32, 64), of=BATCH, make=matching(side=SIDE), note=LENET),
    "feature inversion": Study(sizes=(4, 8, 16, 32, 64), of=BATCH, make=features(side=SIDE), note=LENET),
    "many trials at once": Study(sizes=(1, 4, 16, 64), of="trials", make=trials, note=LENET),
    "participation": Study(sizes=(128, 256, 512, 1024), of="users", make=participation, note="twice as many rounds"),
    "label counts": Study(sizes=(16, 64, 256, 1024), of=BATCH, make=labels, note="100 classes"),
    "MKOR, midpoint": Study(sizes=(1, 4, 16, 64), of=BATCH, make=windows(midpoint, side=224)),
    "MKOR, smoothest": Study(sizes=(2, 4, 8, 16, 32), of=BATCH, make=windows(ONE_FIT, side=64)),
    "MixUp decoding": Study(sizes=(32, 64, 128, 256), of=BATCH, make=mixtures(side=16), note="four encodings a sample"),
    "SSIM of all pairs": Study(sizes=(32, 64, 128, 256), of="images on each side", make=similarities(side=SIDE)),
    "dense inversion, by side": Study(sizes=(16, 32, 64), of=PIXELS, make=dense(count=16), note="batch of 16"),
    "separation, by side": Study(
        sizes=(16, 32, 64),
        of=PIXELS,
        make=separation(CocktailParty(exact=False, denoise=False), count=16),
        note="batch of 16",
    ),
    "separation, exact, by side": Study(
        sizes=(16, 32, 64), of=PIXELS, make=separation(CocktailParty(), count=16), note="batch of 16"
    ),
    "gradient matching, by side": Study(sizes=(16, 32, 64, 128), of=PIXELS, make=matching(count=1), note="batch of 1"),
    "feature inversion, by side": Study(sizes=(16, 32, 64, 128), of=PIXELS, make=features(count=4), note="batch of 4"),
    "MKOR, midpoint, by side": Study(
        sizes=(64, 128, 256), of=PIXELS, make=windows(midpoint, count=4), note="batch of 4"
    ),
    "MKOR, smoothest, by side": Study(
        sizes=(32, 64, 128), of=PIXELS, make=windows(ONE_FIT, count=4), note="batch of 4"
    ),
    "MixUp decoding, by side": Study(sizes=(16, 32, 64), of=PIXELS, make=mixtures(count=64), note="64 samples"),
    "SSIM of all pairs, by side": Study(sizes=(16, 32, 64), of=PIXELS, make=similarities(count=32), note="32 images"),
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
    output = options.output or HERE / "results" / f"growth-{'gpu' if device.type == 'cuda' else 'cpu'}.json"
    before = json.loads(output.read_text())["rows"] if output.exists() else []
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, one thread"
    found = {row["solver"]: row for row in before if row["solver"] in STUDIES}
    for name in options.only:
        study = STUDIES[name]
        points = list(measure(study, device))
        found[name] = {
            "solver": name,
            "of": study.of,
            "note": study.note,
            "points": points,
            "slope": slope(points),
            "last slope": slope(points[-2:]),
        }
        print(json.dumps(found[name]), flush=True)
        rows = [found[name] for name in STUDIES if name in found]
        output.write_text(json.dumps({"device": place, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    if options.chart is not None:
        beside = options.chart.with_stem(f"{options.chart.stem}-by-side")
        for path, of in ((options.chart, BATCH), (beside, PIXELS)):
            curves = {row["solver"].removesuffix(", by side"): row["points"] for row in rows if row["of"] == of}
            path.write_text(line_chart(curves, x=of, y="seconds", log_x=True, log_y=True))


if __name__ == "__main__":
    main()
