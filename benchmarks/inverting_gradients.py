"""Inverting gradients on ResNet-18 and CIFAR-10, batch 1: fedprism beside the peer `breaching`, same captures, one run.

    python benchmarks/inverting_gradients.py --data-dir DATA [--iterations 1000] [--peer-python ENV/bin/python]

The victim is untrained, and trained for two epochs on 5,000 images. Both tools get the same captures, the true label,
the number of iterations in all, the same first start and a total-variation weight; scores are fedprism's, for both. The
default weights are the same: the peer takes the mean over both directions, fedprism the sum of two means. A tool that
cannot be started is reported as such and left out. Writes a table and benchmarks/results/inverting_gradients.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import fedprism as fp
from fedprism.runtime import devices

HERE = Path(__file__).resolve().parent
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def normalised(batch: fp.Batch) -> fp.Batch:
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    return fp.Batch((batch.inputs - mean) / std, batch.labels)


def lightly_trained(model: nn.Module, data_dir: str | None, epochs: int) -> nn.Module:
    device = devices.pick()
    data = fp.data.load("cifar10", split="train", limit=5000, data_dir=data_dir)
    batch = normalised(data.batch(torch.arange(len(data))))
    model.train().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for indices in torch.randperm(len(batch), generator=order).split(128):
            part = batch[indices]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(part.inputs.to(device)), part.labels.to(device)).backward()
            optimizer.step()
    return model.cpu()


def run_tool(
    command: list[str], capture: Path, workers: int, count: int, options: list[str]
) -> tuple[torch.Tensor, float] | str:
    """Reconstructions of all images by a tool, its workers side by side; or the reason why there are none."""
    outputs = [capture.parent / f"out-{number}.safetensors" for number in range(workers)]
    started = [
        subprocess.Popen(
            [*command, str(capture), str(output), "--shard", f"{number}/{workers}", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, output in enumerate(outputs)
    ]
    errors = [process.communicate()[1] for process in started]
    for process, error in zip(started, errors, strict=True):
        if process.returncode:
            return (error.strip().splitlines() or ["no message"])[-1]
    parts = [load_file(output) for output in outputs]
    found = {name: tensor for part in parts for name, tensor in part.items()}
    seconds = torch.cat([part["seconds"] for part in parts])
    return torch.stack([found[f"image-{number}"] for number in range(count)]), float(seconds.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="attacks run side by side")
    parser.add_argument("--tv", type=float, nargs="+", default=[5e-4], help="fedprism's total-variation weights")
    parser.add_argument("--peer-tv", type=float, nargs="+", default=[1e-3], help="the peer's; 0.2 is its default")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with breaching installed")
    parser.add_argument("--peer-path", default=None, help="folder with breaching and what it needs")
    parser.add_argument("--metrics", nargs="+", default=["psnr", "ssim", "lpips-alex"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "inverting_gradients.json")
    args = parser.parse_args()

    device = devices.pick().type
    images = fp.data.load("cifar10", limit=args.images, data_dir=args.data_dir)
    batch = normalised(images.batch(torch.arange(len(images))))
    peer = [args.peer_python, str(HERE / "peers" / "attack_breaching.py")]
    peer_path = ["--peer-path", args.peer_path] if args.peer_path else []
    tools = [
        *(
            (f"fedprism, TV {tv:g}", [sys.executable, str(HERE / "peers" / "attack_fedprism.py")], tv, [])
            for tv in args.tv
        ),
        *((f"breaching, TV {tv:g}", peer, tv, peer_path) for tv in args.peer_tv),
    ]
    rows = []
    for state in ("untrained", "lightly trained"):
        model = fp.models.build("resnet18", classes=10, seed=0)
        if state == "lightly trained":
            lightly_trained(model, args.data_dir, args.epochs)
        scenario = fp.Scenario(
            model=model,
            clients=[batch[i : i + 1] for i in range(len(batch))],
            training=False,
            normalization=(MEAN, STD),
        )
        observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"))
        for name, command, tv, extra in tools:
            with tempfile.TemporaryDirectory() as folder:
                capture = fp.captures.save(observation, Path(folder) / "capture")
                options = ["--iterations", str(args.iterations), "--tv", str(tv), "--device", device, *extra]
                start = time.perf_counter()
                result = run_tool(command, capture, args.workers, len(batch), options)
                wall = time.perf_counter() - start
            row: dict[str, object] = {"victim": state, "tool": name}
            if isinstance(result, str):
                row["unavailable"] = result
            else:
                found, seconds = result
                scores = fp.score(fp.Reconstruction(inputs=found), truth, metrics=args.metrics)
                row |= {metric: scores.mean(metric) for metric in scores.values}
                row |= {"worst psnr": min(v for v in scores.values["psnr"] if v is not None)}
                row |= {"unavailable": dict(scores.unavailable)} if scores.unavailable else {}
                row |= {"seconds an image": seconds, "wall seconds": wall}
            rows.append(row)
            print(json.dumps(row), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"images": len(batch), "iterations": args.iterations, "workers": args.workers, "device": device}
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
