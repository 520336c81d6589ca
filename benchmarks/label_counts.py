"""Labels behind the gradient of a batch: by the signs of the last layer's gradient, and counted.

    python benchmarks/label_counts.py [--data-dir DATA] [--batches 20]

Networks that have learned more and more, batches that are small and large against the number of classes. Without a
data folder, only the small network on embedded photographs. Writes benchmarks/results/label_counts.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import fedprism as fp
from fedprism.attacks.gradient_matching.inferring import inferred_labels
from fedprism.network.network_map import network_map
from fedprism.solvers import label_counts
from fedprism_papers import Settings
from fedprism_papers.gradattack.inversion import ATTACKED_BATCH, Data, attacked_network, data_of
from fedprism_papers.gradattack.labels import BATCHES, compose, in_common

SIZES = (4, 8, 16, 32)
STEPS = {50: (1, 50 * ATTACKED_BATCH), 748: (4, None)}
"""Epochs of the quarter's training, and the images of an epoch."""


def networks(data_dir: str | None) -> Iterator[tuple[str, Data, nn.Module]]:
    quick = Settings(quick=True, device="cpu")
    yield "small network of the quick forms", data_of(quick), attacked_network(data_of(quick), quick)
    if data_dir is None:
        return
    settings = Settings(device="cpu", data_dir=data_dir)
    wide = data_of(settings)
    quarter = wide._replace(network=lambda seed: fp.models.build("resnet18", classes=10, width=16, seed=seed))
    for steps, (epochs, images) in STEPS.items():
        trained = quarter._replace(attacked_epochs=epochs, train=wide.train[:images])
        yield f"quarter of ResNet-18, {steps} steps", quarter, attacked_network(trained, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("FEDPRISM_DATA"))
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "label_counts.json")
    args = parser.parse_args()
    rows = []
    for name, data, model in networks(args.data_dir):
        with torch.no_grad():
            told = copy.deepcopy(model).eval()(data.test.inputs[:1000]).argmax(1)
        accuracy = float((told == data.test.labels[:1000]).double().mean())
        for size in SIZES:
            for kind in BATCHES:
                signs = counted = 0
                for number in range(args.batches):
                    batch = compose(kind, size, data.train, 1, number)
                    scenario = fp.Scenario(model=model, clients=[batch], normalization=data.normalization)
                    seen, _ = fp.simulate(scenario, fp.threats.honest_but_curious, device="cpu")
                    last = list(seen.rounds[0].update.values())[-1]
                    signs += in_common(label_counts(last, size).labels, batch.labels)
                    found = inferred_labels(seen, seen.rounds[0], size, network_map(seen))
                    counted += in_common(found.labels, batch.labels)
                total = size * args.batches
                rows.append(
                    {
                        "network": name,
                        "accuracy": accuracy,
                        "n": size,
                        "labels": kind,
                        "by signs": signs / total,
                        "counted": counted / total,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
