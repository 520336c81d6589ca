"""One worker of a benchmark: the peer `breaching`, unmodified, on some rounds of a capture.

    python attack_breaching.py CAPTURE OUTPUT --shard 0/4 --iterations 1000 --tv 0.001 --device cuda

It reads the capture without fedprism's loader; only the network's definition comes from fedprism. `breaching` is taken
from the environment, or from a folder named by --peer-path (put last, so that it supplies only what is missing).
"""

import argparse
import json
import sys
import time
import types
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("capture", type=Path)
parser.add_argument("output")
parser.add_argument("--shard", default="0/1")
parser.add_argument("--iterations", type=int, default=1000)
parser.add_argument("--tv", type=float, default=1e-3)
parser.add_argument("--device", default="cpu")
parser.add_argument("--peer-path", default=None)
args = parser.parse_args()

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))
if args.peer_path:
    sys.path.append(args.peer_path)
warnings.filterwarnings("ignore")  # its own deprecations
import breaching  # noqa: E402

from fedprism.models import build  # noqa: E402

torch.backends.cudnn.allow_tf32 = False
device = torch.device(args.device)
setup = {"device": device, "dtype": torch.float}
described = json.loads((args.capture / "capture.json").read_text())
knowledge = described["knowledge"]
model = build(described["model"]["name"], **described["model"]["kwargs"]).to(device).eval()
first = described["rounds"][0]
model.load_state_dict(
    {**load_file(args.capture / first["params"]), **load_file(args.capture / first["buffers_before"])}
)
labels = load_file(args.capture / "knowledge.safetensors")
mean, std = knowledge["normalization"]
metadata = types.SimpleNamespace(shape=knowledge["input_shape"], mean=mean, std=std, modality="vision")
payload = {
    "parameters": [p.detach() for p in model.parameters()],
    "buffers": [b.detach() for b in model.buffers()],
    "metadata": metadata,
}


def attack(number: int, iterations: int) -> torch.Tensor:
    overrides = [f"optim.max_iterations={iterations}", f"regularization.total_variation.scale={args.tv}"]
    config = breaching.get_attack_config("invertinggradients", overrides=overrides)
    attacker = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), config, setup)
    update = load_file(args.capture / described["rounds"][number]["update"])
    label = labels[f"labels.{number}"].to(device)
    shared = {
        "gradients": [update[name].to(device) for name, _ in model.named_parameters()],
        "buffers": None,
        "metadata": {"num_data_points": 1, "labels": label, "local_hyperparams": None},
    }
    start = torch.randn(1, *knowledge["input_shape"], generator=torch.Generator().manual_seed(number))
    result, _ = attacker.reconstruct([payload], [shared], {}, initial_data=start.to(device), dryrun=False)
    return result["data"][0].detach().float().cpu()


shard, shards = map(int, args.shard.split("/"))
attack(0, 5)  # warm up, untimed
found, seconds = {}, []
for number in range(shard, len(described["rounds"]), shards):
    start = time.perf_counter()
    found[f"image-{number}"] = attack(number, args.iterations)
    seconds.append(time.perf_counter() - start)
save_file({**found, "seconds": torch.tensor(seconds)}, args.output)
