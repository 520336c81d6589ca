"""Patch inversion on Vision Transformers: how many of 50 held-out photographs come out above 60 dB, and how exactly.

    python benchmarks/patch_inversion.py --data-dir DATA [--images 50] [--seeds 3] [--only "ViT, 32 px"] [--threads 1]

One photograph per update, random weights, or weights that were trained for a few steps on other photographs. 32 px:
CIFAR-10 test photographs, a Vision Transformer with patches of 4 px and a class token, another seed of the weights for
every third of them. 224 px: ImageNet photographs and torchvision's ViT-B/16, whose output layer starts at zero and gets
a random one, because a zero one sends no gradient back. Rows for frozen positions, one step of FedAvg, clipped updates,
short floats and noise show what these change. Each photograph's PSNR is that of the reconstruction as the attack
returns it. Prints what is expected to hold and whether it does, and writes benchmarks/results/patch_inversion.json
after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torchvision.models import VisionTransformer, vit_b_16

import fedprism as fp
from fedprism.attacks.patch_inversion import EXACT
from fedprism.pixels import to_inputs
from fedprism.randomness import generator

WANTED_DB = 60.0
"""PSNR that every photograph is expected to exceed."""
LEAST_EXACT_DB = 40.0
"""PSNR below which an answer that is called exact would be a false one."""
SMALL_SIDE = 32
"""Pixels per side of CIFAR-10's photographs."""
HEAD_SPREAD = 0.02
"""Standard deviation of a random output layer's weights: that of the other layers of a Vision Transformer."""
NORMALIZATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of ImageNet's pixels, as torchvision's networks are fed."""
TRAINING_BATCH = 8
TRAINING_RATE = 1e-4
"""Of Adam."""


class Row(NamedTuple):
    """What is attacked: pixels per side, what the client does, and how many of the photographs."""

    side: int
    options: Mapping[str, object]
    share: float = 1.0
    steps: int = 0
    """How long the network is trained first, on photographs that are not attacked."""
    frozen_positions: bool = False
    """Whether the position parameter is fixed, so that its gradient is not sent."""


ROWS: dict[str, Row] = {
    "ViT, 32 px": Row(32, {}),
    "ViT, 32 px, trained": Row(32, {}, steps=100),
    "ViT, 32 px, frozen positions": Row(32, {}, frozen_positions=True),
    "ViT, 32 px, one step of FedAvg": Row(32, {"protocol": fp.FedAvg(lr=0.1, epochs=1, batch_size=1)}),
    "ViT, 32 px, clipped to 1e-3": Row(32, {"defense": fp.defenses.Clip(1e-3)}),
    "ViT, 32 px, float16": Row(32, {"defense": fp.defenses.Cast("float16")}),
    "ViT, 32 px, bfloat16": Row(32, {"defense": fp.defenses.Cast("bfloat16")}),
    "ViT, 32 px, unit norm and noise 1e-4": Row(
        32, {"defense": fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-4))}
    ),
    "ViT-B/16, 224 px": Row(224, {}),
    "ViT-B/16, 224 px, trained": Row(224, {}, share=0.1, steps=5),
    "ViT-B/16, 224 px, one step of FedAvg": Row(
        224, {"protocol": fp.FedAvg(lr=0.1, epochs=1, batch_size=1)}, share=0.1
    ),
    "ViT-B/16, 224 px, bfloat16": Row(224, {"defense": fp.defenses.Cast("bfloat16")}, share=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the weights, in turn over the photographs")
    parser.add_argument(
        "--only", nargs="*", default=list(ROWS), choices=ROWS, metavar="ROW", help="rows to run, by name"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "patch_inversion.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stored = json.loads(args.output.read_text())["rows"] if args.output.exists() else {}
    for name, row in ROWS.items():
        if name not in args.only:
            continue
        count = max(1, round(row.share * args.images))
        stored[name] = measured(row, count, args.seeds, args.data_dir, args.device)
        print(name, json.dumps({key: value for key, value in stored[name].items() if key != "psnr"}), flush=True)
        args.output.write_text(json.dumps({"expected": expected(stored), "rows": stored}, indent=1) + "\n")
    for sentence, held in expected(stored).items():
        print("holds" if held else "DOES NOT HOLD", "-", sentence)


def measured(row: Row, count: int, seeds: int, folder: Path | None, device: str) -> dict[str, object]:
    """One photograph after the other: PSNR, how many are called exact, and seconds of the attack."""
    photographs = held_out(row.side, folder)
    order = torch.randperm(len(photographs), generator=generator(0, "photographs")).tolist()
    order = order * (1 + count // len(order))
    psnr: list[float] = []
    called_exact, false_exact, seconds = 0, 0, 0.0
    for seed in range(seeds):
        model = small(seed) if row.side == SMALL_SIDE else large(seed)
        train(model, photographs, order[count:], row.steps)
        model.encoder.pos_embedding.requires_grad_(not row.frozen_positions)
        for number in range(seed, count, seeds):
            images = photographs.batch([order[number]])
            batch = fp.Batch(to_inputs(images.inputs, NORMALIZATION), images.labels)
            scenario = fp.Scenario(model=model, clients=[batch], normalization=NORMALIZATION, **row.options)  # type: ignore[arg-type]
            observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=number, device=device)
            began = time.perf_counter()
            answer = fp.run(fp.attacks.patch_inversion(), observation, seed=number, device=device)
            seconds += time.perf_counter() - began
            value = fp.score(answer, truth, metrics=("psnr",)).values["psnr"]
            psnr.append(float(value[0]) if value else 0.0)
            print(f"  {len(psnr)}: {psnr[-1]:.1f} dB, {answer.status}", flush=True)
            called_exact += answer.status == EXACT
            false_exact += answer.status == EXACT and psnr[-1] < LEAST_EXACT_DB
    return {
        "photographs": count,
        "above_60_db": sum(value > WANTED_DB for value in psnr),
        "lowest": min(psnr),
        "median": statistics.median(psnr),
        "called_exact": called_exact,
        "called_exact_below_40_db": false_exact,
        "seconds_per_attack": seconds / count,
        "seeds_of_weights": seeds,
        "psnr": [round(value, 2) for value in psnr],
    }


def held_out(side: int, folder: Path | None) -> fp.data.ImageSet:
    """Photographs that no network here was trained on; without a folder the embedded ones, some of them repeatedly."""
    if folder is None:
        return fp.data.load("photos", size=side)
    return fp.data.load("cifar10" if side == SMALL_SIDE else "imagenet", data_dir=folder)


def small(seed: int) -> VisionTransformer:
    """A Vision Transformer for 32 px with 64 patches."""
    return built(seed, lambda: VisionTransformer(32, 4, 6, 4, 192, 384, num_classes=10))


def large(seed: int) -> VisionTransformer:
    """torchvision's ViT-B/16 for 224 px with 196 patches."""
    return built(seed, vit_b_16)


def built(seed: int, make: Callable[[], VisionTransformer]) -> VisionTransformer:
    rng = generator(seed, "weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    head = model.heads.head
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(HEAD_SPREAD * torch.randn(head.weight.shape, generator=rng))
    return model


def train(model: VisionTransformer, photographs: fp.data.ImageSet, numbers: list[int], steps: int) -> None:
    """A few steps of Adam on these photographs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=TRAINING_RATE)
    for step in range(steps):
        chosen = [numbers[(step * TRAINING_BATCH + each) % len(numbers)] for each in range(TRAINING_BATCH)]
        images = photographs.batch(chosen)
        loss = torch.nn.functional.cross_entropy(model(to_inputs(images.inputs, NORMALIZATION)), images.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def expected(rows: Mapping[str, Mapping[str, object]]) -> dict[str, bool]:
    """The sentences of which the documentation speaks, and whether they hold for what was measured."""
    sentences: dict[str, bool] = {}
    for name in ("ViT, 32 px", "ViT, 32 px, trained", "ViT-B/16, 224 px", "ViT-B/16, 224 px, trained"):
        if name in rows:
            row = rows[name]
            sentences[f"{name}: every one of {row['photographs']} photographs above {WANTED_DB:g} dB"] = (
                row["above_60_db"] == row["photographs"]
            )
    false_exact = [row["called_exact_below_40_db"] for row in rows.values()]
    sentences[f"nothing below {LEAST_EXACT_DB:g} dB is called exact"] = not any(false_exact)
    return sentences


if __name__ == "__main__":
    main()
