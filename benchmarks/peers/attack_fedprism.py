"""One worker of a benchmark: fedprism's inverting-gradients on some rounds of a capture.

python attack_fedprism.py CAPTURE OUTPUT --shard 0/4 --iterations 1000 --tv 0.0005 --device cuda
"""

import argparse
import dataclasses
import time

import torch
from safetensors.torch import save_file

import fedprism as fp
from fedprism.attacks import Labels, TotalVariation, split_updates

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("capture")
parser.add_argument("output")
parser.add_argument("--shard", default="0/1")
parser.add_argument("--iterations", type=int, default=1000)
parser.add_argument("--tv", type=float, default=1e-3)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.backends.cudnn.allow_tf32 = False
shard, shards = map(int, args.shard.split("/"))
parts = split_updates(fp.captures.load(args.capture))
attack = dataclasses.replace(
    fp.attacks.inverting_gradients(),
    iterations=args.iterations,
    labels=Labels.KNOWN,
    priors=(TotalVariation(args.tv),),
)
fp.run(dataclasses.replace(attack, iterations=10), parts[0], device=args.device)  # warm up, untimed
found, seconds = {}, []
for number in range(shard, len(parts), shards):
    starts = torch.Generator().manual_seed(number)  # the first start is the peer's
    attack = dataclasses.replace(attack, start=lambda shape, _, starts=starts: torch.randn(shape, generator=starts))
    began = time.perf_counter()
    found[f"image-{number}"] = fp.run(attack, parts[number], device=args.device).inputs[0]
    seconds.append(time.perf_counter() - began)
save_file({**found, "seconds": torch.tensor(seconds)}, args.output)
