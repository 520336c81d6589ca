"""What the exact stage adds to separation where noise, pruning or few bits have altered the gradient.

    python benchmarks/noisy_batches.py [--data-dir DATA] [--batches 4]

The exact stage chooses without the truth between its own answer and the separation. Here the truth says how often that
was wrong, and by how many decibels. Without a data folder, only the embedded photographs. Writes
benchmarks/results/noisy_batches.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import losses
from fedprism.solvers import Downstream, exact_batch

SIZES = (8, 16, 32)
UNITS = 256
ALTERATIONS = (
    *(fp.defenses.GaussianNoise(strength) for strength in (0.01, 0.03, 0.1, 0.3, 1.0)),
    *(fp.defenses.Prune(ratio) for ratio in (0.5, 0.7, 0.9, 0.97)),
    *(fp.defenses.Quantize(bits) for bits in (4, 2, 1)),
    fp.chain(fp.defenses.GaussianNoise(0.1), fp.defenses.Prune(0.9)),
)
"""Noise is relative to the root mean square of the layer's gradient."""
NOTICEABLE = 0.02
"""Decibels below which two answers are the same."""


def data_sets(data_dir: str | None) -> Iterator[tuple[str, fp.data.ImageSet]]:
    yield "photographs", fp.data.load("photos", size=32)
    if data_dir is not None:
        yield "CIFAR-10", fp.data.load("cifar10", data_dir=data_dir)


def altered(gradients: list[Tensor], defense: fp.defenses.Defense, seed: int) -> list[Tensor]:
    size = gradients[0].square().mean().sqrt()
    sent = {"weight": gradients[0] / size, "bias": gradients[1] / size}
    left = defense.on_update(sent, fp.defenses.Context(), torch.Generator().manual_seed(seed))
    return [left["weight"] * size, left["bias"] * size]


def decibels(found: Tensor, truth: Tensor) -> float:
    """Mean PSNR of whatever comes nearest to each image."""
    errors = (found.clamp(0, 1).unsqueeze(0) - truth.unsqueeze(1)).square().mean(2)
    return float(-10 * errors.min(1).values.log10().mean())


def gain(images: fp.data.ImageSet, size: int, alteration: fp.defenses.Defense, seed: int) -> float:
    """Decibels that the exact stage adds to what was separated."""
    batch = images.draw(size, torch.Generator().manual_seed(seed))
    inputs, shape = batch.inputs.flatten(1), tuple(batch.inputs.shape[1:])
    model = fp.models.build("fc2", input_shape=shape, hidden=UNITS, classes=images.classes, seed=seed)
    layer, head = model[1], model[2:]
    loss = nn.functional.cross_entropy(head(layer(inputs)), batch.labels)
    weight_grad, bias_grad = altered(list(torch.autograd.grad(loss, (layer.weight, layer.bias))), alteration, seed)
    downstream = Downstream(
        network=head.double(), loss=losses.cross_entropy, weight=layer.weight.detach(), bias=layer.bias.detach()
    )
    box = torch.zeros(1, inputs.shape[1]), torch.ones(1, inputs.shape[1])
    found = exact_batch(weight_grad, bias_grad, downstream, components=size, image_shape=shape, box=box)
    return decibels(found.inputs, inputs) - decibels(found.separation.sources, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "noisy_batches.json")
    args = parser.parse_args()
    rows = []
    for name, images in data_sets(args.data_dir):
        for size in SIZES:
            for alteration in ALTERATIONS:
                gains = [gain(images, size, alteration, seed) for seed in range(args.batches)]
                rows.append({"data": name, "n": size, "alteration": repr(alteration), "gains": gains})
                print(json.dumps(rows[-1]), flush=True)
    every = [value for row in rows for value in row["gains"]]
    worse = [value for value in every if value < -NOTICEABLE]
    better = [value for value in every if value > NOTICEABLE]
    print(
        f"{len(every)} batches: {len(better)} nearer by {sum(better) / max(1, len(better)):.1f} dB on average, "
        f"{len(worse)} further by up to {-min(worse, default=0):.1f} dB"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
