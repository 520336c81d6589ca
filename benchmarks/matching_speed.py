"""How fast gradient matching is: fedprism beside the peer `breaching` 0.1.2 and beside a plain loop, in one run.

    python benchmarks/matching_speed.py [--device cuda] [--cases lenet:1 resnet18:16] [--engines graph graph+tf32]
    python benchmarks/matching_speed.py --peer-path FOLDER        # breaching and what it needs lie in FOLDER

Each case is a network and a batch size: one update of real photographs, attacked by all tools with the true labels, the
same start, iterations, total variation, learning rate and pixel box, one start each. Times are of the whole call after
a warm-up, capture of graphs included; PSNR is computed here, in the same way for all. On a GPU times are by the clock,
on a CPU of the processor, so that other work on the machine counts less. The plain loop is this file's own, written
after the paper (Geiping et al. 2020) the way the published code goes about it; it is there where the peer is not.
It needs PyTorch, NumPy and pydantic; without the packages that carry the photographs, pictures are made up and the
table says so. Writes a table and a JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import itertools
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "src"))

# Solvers that play no part here ask for these when they are imported; a machine lent for speed may be without them.
for names in (
    (
        "scipy",
        "scipy.linalg",
        "scipy.ndimage",
        "scipy.optimize",
        "scipy.sparse",
        "scipy.sparse.csgraph",
        "scipy.special",
    ),
    ("safetensors", "safetensors.torch"),
):
    try:
        importlib.import_module(names[0])
    except ImportError:
        sys.modules.update(dict.fromkeys(names, MagicMock()))

import fedprism as fp  # noqa: E402
from fedprism.attacks import Engine, GradientMatching, Labels, TotalVariation  # noqa: E402

CASES = {
    "cpu": ["lenet:1", "lenet:8", "resnet18:1", "resnet18:16", "resnet18:32"],
    "cuda": ["lenet:1", "lenet:8", "resnet18:1", "resnet18:16", "resnet18:32"],
}
ITERATIONS = {("cpu", "lenet"): 200, ("cpu", "resnet18"): 20, ("cuda", "lenet"): 1000, ("cuda", "resnet18"): 200}
LARGE, FEW = 16, 6
"""On a CPU a deep network and a batch as large as this are given so few iterations."""
LR, TV = 0.1, 5e-4
"""Ours is the sum of two means, the peer's the mean over both directions, so its weight is twice as large."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SLOPES = "slope"
"""What stands before how the slope was found, in what is said of the iterations."""
KWARGS = {"lenet": {"input_shape": [3, 32, 32], "classes": 10}, "resnet18": {"classes": 10}}


@dataclasses.dataclass(frozen=True)
class Problem:
    network: str
    batch: fp.Batch
    start: Tensor
    observation: fp.Observation

    @property
    def model(self) -> nn.Module:
        model = self.observation.model
        assert model is not None
        return model


def iterations_of(network: str, size: int, device: str) -> int:
    large = device == "cpu" and network != "lenet" and size >= LARGE
    return FEW if large else ITERATIONS[device, network]


def warm_up(iterations: int) -> int:
    """How many come before those that are timed."""
    return min(5, max(1, iterations // 4))


def pictures(count: int) -> tuple[Tensor, Tensor, str]:
    """Photographs, pixels in [0, 1], with labels; smooth made-up pictures where the photographs are not installed."""
    try:
        batch = fp.data.load("photos", size=32).batch(torch.arange(count))
    except ImportError:
        rng = torch.Generator().manual_seed(0)
        small = torch.rand(count, 3, 5, 5, generator=rng)
        return F.interpolate(small, size=(32, 32), mode="bicubic").clamp(0, 1), torch.arange(count) % 10, "made up"
    return batch.inputs, batch.labels, "photographs"


def problem(network: str, size: int, device: str) -> Problem:
    pixels, labels, _ = pictures(size)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    batch = fp.Batch((pixels - mean) / std, labels)
    model = fp.models.build(network, seed=0, **KWARGS[network])
    scenario = fp.Scenario(model=model, clients=[batch], training=False, normalization=(MEAN, STD))
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), device=device)
    start = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(0))
    return Problem(network, batch, start, observation)


def tasks_of(cases: Sequence[str], device: str, iterations: int | None = None) -> list[tuple[Problem, int]]:
    """The problem and the number of iterations of each case, such as lenet:8."""
    found = []
    for case in cases:
        network, _, size = case.partition(":")
        wanted = iterations or iterations_of(network, int(size), device)
        found.append((problem(network, int(size), device), wanted))
    return found


def psnr(found: Tensor, batch: fp.Batch) -> float:
    """Mean over the true images, each paired with what is closest of what is left among those of its label."""
    std = torch.tensor(STD).view(1, 3, 1, 1)
    errors = torch.cdist((found.cpu() * std).flatten(1), (batch.inputs * std).flatten(1)).square() / found[0].numel()
    errors[batch.labels[:, None] != batch.labels[None, :]] = math.inf
    values = []
    for _ in range(len(errors)):
        row, column = divmod(int(errors.argmin()), len(errors))
        values.append(-10 * math.log10(max(float(errors[row, column]), 1e-12)))
        errors[row, :], errors[:, column] = math.inf, math.inf
    return sum(values) / len(values)


def ours(task: Problem, iterations: int, device: str, engine: Engine) -> tuple[Tensor, str]:
    attack = GradientMatching(
        priors=(TotalVariation(TV),),
        labels=Labels.KNOWN,
        lr=LR,
        iterations=iterations,
        start=lambda shape, rng: task.start,
        engine=engine,
    )
    found = fp.run(attack, task.observation, device=device)
    assert found.inputs is not None
    return found.inputs, f"{found.diagnostics['stepping']}; {SLOPES}: {found.diagnostics['slopes']}"


def plain_loop(task: Problem, iterations: int, device: str) -> tuple[Tensor, str]:
    """The published method in the published way: a loop in Python that looks at the objective in every iteration."""
    model, seen = task.model.to(device).eval(), task.observation.rounds[0]
    parameters = list(model.parameters())
    target = [seen.update[name].to(device) for name, _ in model.named_parameters()]
    labels, inputs = task.batch.labels.to(device), task.start.to(device).clone().requires_grad_()
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
    optimizer = torch.optim.Adam([inputs], lr=LR)
    milestones = [int(iterations * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    best, kept = math.inf, inputs.detach().clone()
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        product = norm = wanted = torch.zeros((), device=device)
        for g, t in zip(gradients, target, strict=True):
            product, norm, wanted = product + (g * t).sum(), norm + g.pow(2).sum(), wanted + t.pow(2).sum()
        across, down = inputs.diff(dim=-1).abs().mean(), inputs.diff(dim=-2).abs().mean()
        objective = 1 - product / (norm.sqrt() * wanted.sqrt()) + TV * (across + down)
        objective.backward(inputs=[inputs])
        if objective < best:
            best, kept = objective.item(), inputs.detach().clone()
        assert inputs.grad is not None
        inputs.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            inputs.clamp_(-mean / std, (1 - mean) / std)
    return kept, "step by step"


def breaching(tasks: Sequence[tuple[Problem, int]], device: str, command: Sequence[str]) -> list[dict[str, object]]:
    """The peer on every problem for so many iterations, in a process and, if it has one, an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answers, arguments = list[Path](), list[str]()
        for number, (task, iterations) in enumerate(tasks):
            seen = task.observation.rounds[0]
            given, answer = Path(folder) / f"given-{number}.pt", Path(folder) / f"answer-{number}.pt"
            state = {name: tensor.cpu() for name, tensor in task.model.state_dict().items()}
            update = {name: tensor.cpu() for name, tensor in seen.update.items()}
            torch.save({"state": state, "update": update, "labels": task.batch.labels, "start": task.start}, given)
            about = {"network": task.network, "kwargs": KWARGS[task.network], "mean": MEAN, "std": STD}
            about |= {"iterations": iterations, "tv": 2 * TV, "device": device, "warm_up": warm_up(iterations)}
            answers.append(answer)
            arguments += [str(given), str(answer), json.dumps(about)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [_its_answer(answer) if answer.exists() else {"unavailable": reason} for answer in answers]


def _its_answer(answer: Path) -> dict[str, object]:
    found = torch.load(answer, weights_only=True)
    return {"found": found["inputs"], "clock": found["clock"], "processor": found["processor"], "stepping": "its own"}


def timed(attack: Callable[[int], tuple[Tensor, str]], iterations: int, device: str) -> dict[str, object]:
    attack(warm_up(iterations))
    gc.collect()  # not in the middle of one of the two
    if device == "cuda":
        torch.cuda.synchronize()
    clock, processor = time.perf_counter(), time.process_time()
    found, stepping = attack(iterations)
    found = found.cpu()  # waits for the device
    return {
        "found": found,
        "clock": time.perf_counter() - clock,
        "processor": time.process_time() - processor,
        "stepping": stepping,
    }


def flops(task: Problem, stepping: str = "") -> int:
    """Of one iteration: a pass forward, two back for the gradient, four for its derivative by the inputs, or two where
    `stepping` says that this is a difference.

    Each costs what the pass forward costs, of which products and convolutions are counted.
    """
    model, counter = task.model.cpu().eval(), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(task.start)
    return (5 if f"{SLOPES}: the difference" in stepping else 7) * counter.get_total_flops()


def matrix_rate(device: str, tf32: bool) -> float:
    """Floating-point operations a second that this device does in a large product of matrices."""
    size, times = (8192, 20) if device == "cuda" else (1024, 5)
    with Engine(tf32=tf32).settings():
        left = torch.randn(size, size, device=device)
        for repeats in (2, times):
            began = time.perf_counter() if device == "cuda" else time.process_time()
            for _ in range(repeats):
                product = left @ left
            float(product[0, 0])
            ended = time.perf_counter() if device == "cuda" else time.process_time()
    return 2 * size**3 * times / (ended - began)


def engine(words: str) -> Engine:
    names = {field.name for field in dataclasses.fields(Engine)}
    chosen = set(words.replace("-", "_").split("+")) - {"plain"}
    if chosen - names:
        raise SystemExit(f"expected engines out of {sorted(names)} joined by +, or plain, found {words}")
    return Engine(**{name: name in chosen for name in names})


def growth(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The slope of log time against log batch size, by network and tool: at 1, twice the batch takes twice the time."""
    lines = []
    for (network, tool), group in itertools.groupby(
        sorted((row for row in rows if "rate" in row), key=lambda row: (str(row["network"]), str(row["tool"]))),
        key=lambda row: (row["network"], row["tool"]),
    ):
        points = [(math.log(float(str(row["batch"]))), -math.log(float(str(row["rate"])))) for row in group]
        if len(points) > 1:
            x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
            slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
            lines.append({"network": network, "tool": tool, "slope": slope, "batches": len(points)})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=None, metavar="NETWORK:BATCH")
    parser.add_argument(
        "--engines", nargs="+", default=["graph+differences"], help="such as plain, graph, graph+autotune+tf32"
    )
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with breaching installed")
    parser.add_argument("--peer-path", default=None, help="folder with breaching and what it needs")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    peer = ["env", f"BREACHING={args.peer_path or ''}", args.peer_python, str(HERE / "peers" / "speed_breaching.py")]
    torch.backends.cudnn.allow_tf32 = False
    rates = {tf32: matrix_rate(args.device, tf32) for tf32 in (False, True)}
    rows: list[dict[str, object]] = []
    tasks = tasks_of(args.cases or CASES[args.device], args.device, args.iterations)
    for (task, iterations), theirs in zip(tasks, breaching(tasks, args.device, peer), strict=True):
        network, size = task.network, len(task.batch)
        results = {"breaching 0.1.2": theirs}
        results["plain loop"] = timed(lambda n, task=task: plain_loop(task, n, args.device), iterations, args.device)
        for words in args.engines:
            results[f"fedprism, {words}"] = timed(
                lambda n, task=task, words=words: ours(task, n, args.device, engine(words)), iterations, args.device
            )
        others = {}
        for tool, result in results.items():
            row: dict[str, object] = {"network": network, "batch": size, "tool": tool, "iterations": iterations}
            if "found" not in result:
                rows.append({**row, **result})
                print(json.dumps(rows[-1]), flush=True)
                continue
            found = result["found"]
            assert isinstance(found, Tensor)
            seconds = float(str(result["clock" if args.device == "cuda" else "processor"]))
            row |= {"rate": iterations / seconds, "psnr": psnr(found, task.batch), "stepping": result["stepping"]}
            work = flops(task, str(result["stepping"]))
            row["share of the matrix rate"] = work * iterations / seconds / rates["tf32" in tool]
            if not tool.startswith("fedprism"):
                others[tool] = iterations / seconds
            else:
                row |= {f"times as fast as {other}": iterations / seconds / rate for other, rate in others.items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    machine = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    about = {"machine": machine, "torch": torch.__version__, "pictures": pictures(1)[2], "matrix rate": rates[False]}
    slopes = growth(rows)
    for line in slopes:
        print(f"{line['network']}, {line['tool']}: time grows as batch size to the power {line['slope']:.2f}")
    output = args.output or HERE / "results" / f"matching_speed_{args.device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**about, "rows": rows, "growth": slopes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
