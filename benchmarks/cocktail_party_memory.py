"""Cocktail party on features before a dense layer of VGG-16's size: exactness, seconds and peak memory by batch size.

    python benchmarks/cocktail_party_memory.py [--sizes 128,512,1024] [--data-dir DATA] [--device cuda] [--quick]

Features of ImageNet's photographs through VGG-16's convolutions where `--data-dir` has both (mirrored ones fill up more
than 1,000), else sparse random ones, which need no data. `--quick`: 512 units and 4,096 random features, batches of 32
to 256, for a CPU. Every size runs in a process of its own: on a GPU its peak is that of the allocator from the gradient
on, else the process' resident memory, and what it had before the attack beside it. Writes
benchmarks/results/cocktail_party_memory.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices
from fedprism.solvers import Downstream, exact_batch
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.victims import vgg16_imagenet

CLASSES = 1000
ACTIVE = 0.16
"""Share of features above zero; in VGG-16 it is 0.16."""
MEBIBYTE = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], default=None)
    parser.add_argument("--units", type=int, default=None)
    parser.add_argument("--features", type=int, default=None)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cocktail_party_memory.json")
    parser.add_argument("--one", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = args.sizes or ((32, 128, 256) if args.quick else (128, 512, 1024))
    units = args.units or (512 if args.quick else 4096)
    if args.one is not None:
        print(json.dumps(_measure(torch.load(args.one, weights_only=True)[: sizes[0]], units, args.device)))
        return
    count = args.features or (4096 if args.quick else 25088)
    features, origin = _features(max(sizes), count, args.data_dir, args.device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.pt"
        torch.save(features, path)
        for size in sizes:
            row = {"size": size, **_in_own_process(path, size, units, args.device, args.threads)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    summary = {"units": units, "features": features.shape[1], "origin": origin, "rows": rows}
    args.output.write_text(json.dumps(summary, indent=1) + "\n")


def _features(size: int, count: int, data_dir: Path | None, device: str | None) -> tuple[Tensor, str]:
    """Features (size, count), all of them different, and where they are from."""
    if data_dir is None:
        sparse = torch.randn(size, count, generator=generator(0, "features"))
        threshold = NormalDist().inv_cdf(1 - ACTIVE)
        return torch.relu(sparse - threshold), "random"
    victim = vgg16_imagenet(Settings(data_dir=data_dir, device=device))
    batch = victim.draw(size, generator(0, "batch", victim.name, size))
    return victim.embed(batch.inputs, device), victim.note


def _in_own_process(path: Path, size: int, units: int, device: str | None, threads: int) -> dict[str, object]:
    options = ["--one", path, "--sizes", size, "--units", units, "--threads", threads]
    options += [] if device is None else ["--device", device]
    command = [sys.executable, __file__, *map(str, options)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        return {"failed": finished.stderr.strip().splitlines()[-1] if finished.stderr else str(finished.returncode)}
    measured: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return measured


def _measure(features: Tensor, units: int, device: str | None) -> dict[str, object]:
    """The exact stage on the gradient of fresh dense layers of VGG-16's kind, for one batch of features."""
    place = devices.pick(device)
    with seeded_layers(generator(0, "dense layers")):
        first = nn.Linear(features.shape[1], units)
        tail = nn.Sequential(nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, CLASSES))
    first, tail = first.to(place), tail.to(place)
    labels = torch.randint(CLASSES, (len(features),), generator=generator(0, "labels"))
    loss = cross_entropy(tail(first(features.to(place))), labels.to(place))
    weight_grad, bias_grad = torch.autograd.grad(loss, [first.weight, first.bias])
    tail = tail.double().requires_grad_(False)
    downstream = Downstream(network=tail, loss=cross_entropy, weight=first.weight.detach(), bias=first.bias.detach())
    del loss
    before = _memory(place)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = exact_batch(weight_grad, bias_grad, downstream, components=len(features))
    inputs = found.inputs.cpu()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / MEBIBYTE if place.type == "cuda" else _memory(place)
    closest = _closest(inputs, features)
    right = None if found.labels is None else float((found.labels.cpu()[closest[1]] == labels).double().mean())
    return {
        "device": str(place),
        "status": found.status,
        "exact": found.exact,
        "certificate": found.residual,
        "smallest cosine": float(closest[0].min()),
        "labels right": right,
        "seconds": seconds,
        "gradient MiB": weight_grad.numel() * weight_grad.element_size() / MEBIBYTE,
        "before MiB": before,
        "peak MiB": peak,
    }


def _memory(place: torch.device) -> float:
    """Mebibytes: what is allocated on a GPU, or the most that was resident so far."""
    if place.type == "cuda":
        return torch.cuda.memory_allocated() / MEBIBYTE
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident / (MEBIBYTE if sys.platform == "darwin" else 1024)


def _closest(found: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample the cosine of the answer closest to it, and its row."""
    found, features = found.double(), features.double()
    cosines = (found @ features.T) / found.norm(dim=1, keepdim=True) / features.norm(dim=1)
    rows = cosines.argmax(0)
    return cosine_similarity(found[rows], features), rows


if __name__ == "__main__":
    main()
