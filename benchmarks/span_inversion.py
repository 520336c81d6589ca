"""Span inversion on trained convolutional networks: how exactly images come out, what stops it, and other attacks.

    python benchmarks/span_inversion.py --data-dir DATA [--images 6] [--only "one image"] [--threads 1]
    python benchmarks/span_inversion.py --data-dir DATA --network resnet18 --side 32 --training-steps 1496 --images 50 \
        --device cuda --only "one image" "four images" "eight images" "one image, batch norm in train mode"

The small network has convolutions of 32, 96, 96, 192 and 192 channels with strides 1, 2, 1, 2, 1, and is trained on
half of the CIFAR-10 test photographs, shrunk to 16 px; the attacked photographs are of the other half. Seconds are
those of the processor, or of the clock on a GPU. PSNR is of the images as the attack returns them; "up to gain"
multiplies each by the one number that fits best, for networks that hide it. Without a data folder the
embedded photographs are used.
Writes benchmarks/results/span_inversion.json after every row, and prints what is expected to hold and whether it does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

import fedprism as fp
from fedprism.attacks.span_inversion.attack import SpanInversionStatus
from fedprism.pixels import to_inputs, to_pixels
from fedprism.randomness import generator

NORMALIZATION = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
"""Mean and standard deviation of CIFAR-10's pixels, as published with most networks for it."""
WIDTHS = (32, 96, 96, 192, 192)
STRIDES = (1, 2, 1, 2, 1)
EXACT_DB = 100.0
"""PSNR that every single image is expected to exceed on the small network."""
LEAST_EXACT_DB = 40.0
"""PSNR below which an answer that is called exact would be a false one."""
BATCH = 64
"""Samples per training step."""
RATE = 0.05
"""Learning rate of the training, with momentum 0.9 and weight decay 5e-4."""
NORMS = {"batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(8, width), "none": lambda width: nn.Identity()}


class Row(NamedTuple):
    """What is attacked: images behind an update, the network's normalisation, its mode, what else the client does."""

    size: int = 1
    norm: str = "batch"
    training: bool = False
    options: Mapping[str, object] = {}
    share: float = 1.0
    """Of the number of attacked updates."""


ONE_STEP = fp.FedAvg(lr=0.01)
ROWS: dict[str, Row] = {
    "one image": Row(),
    "two images": Row(2, share=0.5),
    "four images": Row(4, share=0.34),
    "eight images": Row(8, share=0.17),
    "one image, group norm": Row(norm="group", share=0.5),
    "one image, no norm": Row(norm="none", share=0.5),
    "one image, batch norm in train mode": Row(training=True, share=0.34),
    "one image, float16": Row(options={"defense": fp.defenses.Cast("float16")}, share=0.34),
    "one image, bfloat16": Row(options={"defense": fp.defenses.Cast("bfloat16")}, share=0.17),
    "one image, 8 bits": Row(options={"defense": fp.defenses.Quantize(8)}, share=0.17),
    "one image, unit norm and noise 1e-5": Row(
        options={"defense": fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-5))}, share=0.17
    ),
    "one image, unit norm and noise 1e-4": Row(
        options={"defense": fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-4))}, share=0.17
    ),
    "one image, unit norm and noise 1e-3": Row(
        options={"defense": fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-3))}, share=0.17
    ),
    "one image, half of the entries pruned": Row(options={"defense": fp.defenses.Prune(0.5)}, share=0.17),
    "one image, FedAvg of one step": Row(options={"protocol": ONE_STEP}, share=0.34),
    "one image, FedAvg of three steps": Row(options={"protocol": fp.FedAvg(lr=0.01, epochs=3)}, share=0.17),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--network", choices=["small", "resnet18", "resnet18-quarter"], default="small")
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--training-steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=6, help="attacked updates of a row of full share")
    parser.add_argument("--only", nargs="+", choices=list(ROWS))
    parser.add_argument("--beside", type=int, default=1, help="updates of a row that other attacks are run on, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.allow_tf32 = False  # clients on a GPU with 10 bits would send rounded gradients
    name = "span_inversion" if args.network == "small" else f"span_inversion_{args.network}_{args.side}"
    output = args.output or Path(__file__).parent / "results" / f"{name}.json"
    rows = json.loads(output.read_text())["rows"] if output.exists() else {}
    photographs = photographs_of(args.data_dir, args.side)
    networks: dict[str, nn.Module] = {}
    for name in args.only or ROWS:
        row = ROWS[name]
        if row.norm not in networks:
            networks[row.norm] = trained(args.network, row.norm, photographs, args.training_steps, args.device)
        count = max(1, round(row.share * args.images))
        rows[name] = measured(row, networks[row.norm], photographs, count, args.beside, args.device)
        print(name, json.dumps(rows[name]), flush=True)
        told = {"network": args.network, "side": args.side, "training_steps": args.training_steps}
        output.write_text(json.dumps({**told, "expected": expected(rows), "rows": rows}, indent=1) + "\n")
    for sentence, held in expected(rows).items():
        print("holds" if held else "DOES NOT HOLD", "-", sentence)


def photographs_of(folder: Path | None, side: int) -> fp.data.ImageSet:
    """CIFAR-10's test photographs, or the embedded ones, shrunk."""
    if folder is None:
        return fp.data.load("photos", size=side)
    whole = fp.data.load("cifar10", data_dir=folder)
    images = adaptive_avg_pool2d(whole.images.float(), side).round().to(torch.uint8)
    return fp.data.ImageSet("cifar10", images, whole.labels, whole.class_names)


def built(network: str, norm: str) -> nn.Module:
    if network != "small":
        return fp.models.build("resnet18", classes=10, width=16 if network == "resnet18-quarter" else 64, seed=0)
    layers, channels = list[nn.Module](), 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for width, stride in zip(WIDTHS, STRIDES, strict=True):
            convolution = nn.Conv2d(channels, width, 3, stride, 1, bias=norm == "none")
            layers += [convolution, NORMS[norm](width), nn.ReLU()]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def trained(network: str, norm: str, photographs: fp.data.ImageSet, steps: int, device: str) -> nn.Module:
    """The network after so many steps on the second half of the photographs."""
    model, rng = built(network, norm).to(device).train(), generator(0, "training", norm)
    half = len(photographs.labels) // 2
    descent = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    for _ in range(steps):
        batch = photographs.batch((half + torch.randint(half, (BATCH,), generator=rng)).tolist())
        inputs = to_inputs(batch.inputs, NORMALIZATION).to(device)
        descent.zero_grad()
        cross_entropy(model(inputs), batch.labels.to(device)).backward()
        descent.step()
    return model.cpu()


def measured(
    row: Row, model: nn.Module, photographs: fp.data.ImageSet, count: int, beside: int, device: str
) -> dict[str, object]:
    """One update after the other: PSNR, what the attack says, seconds; the first ones with other attacks, too."""
    order = torch.randperm(len(photographs.labels) // 2, generator=generator(0, "attacked")).tolist()
    psnr, aligned, seconds, statuses, false_exact = list[float](), list[float](), list[float](), list[str](), 0
    others: dict[str, list[float]] = {}
    for number in range(count):
        images = photographs.batch(order[number * row.size : (number + 1) * row.size])
        batch = fp.Batch(to_inputs(images.inputs, NORMALIZATION), images.labels)
        scenario = fp.Scenario(
            model=model,
            clients=[batch],
            training=row.training,
            normalization=NORMALIZATION,
            **row.options,  # type: ignore[arg-type]
        )
        threat = fp.threats.honest_but_curious
        observation, truth = fp.simulate(scenario, threat, seed=number, device=device)
        began = now(device)
        answer = fp.run(fp.attacks.span_inversion(), observation, seed=number, device=device)
        seconds.append(now(device) - began)
        values = quality(answer, truth)
        psnr += values
        aligned += up_to_gain(answer.tensor, batch.tensor, images.inputs)
        statuses.append(answer.status)
        false_exact += answer.status.startswith(SpanInversionStatus.EXACT) and min(values) < LEAST_EXACT_DB
        if number < beside:
            granted, _ = fp.simulate(scenario, threat.granting("labels", "batchnorm_exact"), seed=number, device=device)
            for name, attack in (
                ("inverting-gradients", fp.attacks.inverting_gradients(iterations=300)),
                ("bn-exact", fp.attacks.bn_exact(iterations=300)),
            ):
                if name == "bn-exact" and row.norm != "batch":
                    continue
                others.setdefault(name, []).extend(quality(fp.run(attack, granted, seed=number, device=device), truth))
    return {
        "updates": count,
        "images": len(psnr),
        "above_100_db": sum(value > EXACT_DB for value in psnr),
        "above_60_db": sum(value > 60 for value in psnr),
        "above_40_db": sum(value > LEAST_EXACT_DB for value in psnr),
        "median": round(statistics.median(psnr), 1),
        "psnr": [round(value, 1) for value in psnr],
        "psnr_up_to_gain": [round(value, 1) for value in aligned],
        "seconds": [round(value, 1) for value in seconds],
        "statuses": sorted(set(statuses)),
        "called_exact": sum(status.startswith(SpanInversionStatus.EXACT) for status in statuses),
        "called_exact_below_40_db": false_exact,
        "others_with_labels_and_statistics": {name: [round(v, 1) for v in each] for name, each in others.items()},
    }


def now(device: str) -> float:
    """Seconds of the processor, because others may use it, too; of the clock on a GPU."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def quality(answer: fp.Reconstruction, truth: fp.Truth) -> list[float]:
    return [value or 0.0 for value in fp.score(answer, truth, metrics=("psnr",)).values["psnr"]]


def up_to_gain(found: Tensor, inputs: Tensor, pixels: Tensor) -> list[float]:
    """The PSNR of each private image with the answer closest to it, multiplied by the number that fits best."""
    values = []
    for image, original in zip(inputs.double(), pixels.double(), strict=True):
        best = 0.0
        for each in found.double().cpu():
            fitted = each * ((each * image).sum() / each.square().sum().clamp_min(1e-30))
            error = (to_pixels(fitted[None], (0.0, 1.0), NORMALIZATION)[0] - original).square().mean()
            best = max(best, float(-10 * error.clamp_min(1e-30).log10()))
        values.append(best)
    return values


def expected(rows: Mapping[str, Mapping[str, object]]) -> dict[str, bool]:
    """The sentences of which the documentation speaks, and whether they hold for what was measured."""
    sentences: dict[str, bool] = {}
    if "one image" in rows:
        row = rows["one image"]
        sentences[f"every one of {row['images']} single images above {EXACT_DB:g} dB"] = (
            row["above_100_db"] == row["images"]
        )
    if "two images" in rows:
        row = rows["two images"]
        half = 2 * int(str(row["above_60_db"])) >= int(str(row["images"]))
        sentences[f"half of {row['images']} images in batches of two above 60 dB"] = half
    false_exact = [row["called_exact_below_40_db"] for row in rows.values()]
    sentences[f"nothing below {LEAST_EXACT_DB:g} dB is called exact"] = not any(false_exact)
    return sentences


if __name__ == "__main__":
    main()
