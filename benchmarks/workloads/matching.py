"""Gradient matching beside the peer `breaching` 0.1.2, where it is there, and beside a plain loop after the paper.

The same as `matching_speed.py`, as rows of the table: same start, iterations, labels and priors for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import matching_speed as speed
import torch
from torch import Tensor

from workloads.base import Clock, Comparison, Conditions, matrix_rate

Attempt: TypeAlias = Callable[[int], tuple[Tensor, str]]
PEER = speed.HERE / "peers" / "speed_breaching.py"
PLAIN, TF32 = "graph+differences", "graph+differences+autotune+tf32"
ENGINES = {("cuda", "resnet18"): (PLAIN, TF32)}


def matching(conditions: Conditions) -> Iterator[Comparison]:
    device = conditions.device.type
    torch.backends.cudnn.allow_tf32 = False
    rates = {False: matrix_rate(conditions.device), True: speed.matrix_rate(device, True)}
    clock = "processor" if Clock.processor else "clock"
    tasks = speed.tasks_of(speed.CASES[device], device)
    peers: list[dict[str, object]] = [{} for _ in tasks]
    if conditions.peer is not None:
        peers = speed.breaching(tasks, device, [*conditions.peer, str(PEER)])
    for (task, iterations), peer in zip(tasks, peers, strict=True):
        network, size = task.network, len(task.batch)
        others = {"plain loop, after the paper": speed.timed(_loop(task, device), iterations, device)}
        if "found" in peer:
            others["breaching 0.1.2"] = peer
        elif peer:
            print(f"breaching left out: {peer['unavailable']}", flush=True)
        for words in ENGINES.get((device, network), (PLAIN,)):
            ours = speed.timed(_ours(task, device, words), iterations, device)
            seconds, work = float(str(ours[clock])), speed.flops(task, str(ours["stepping"]))
            for other, result in others.items():
                yield Comparison(
                    workload="gradient matching" if words == PLAIN else "gradient matching, TF32",
                    size=f"{network}, batch {size}, {iterations} iterations",
                    ours=seconds,
                    quality=_quality(ours, task),
                    other=other,
                    theirs=float(str(result[clock])),
                    their_quality=_quality(result, task),
                    share_of_limit=work * iterations / seconds / rates["tf32" in words],
                    note=f"{ours['stepping']}; pictures: {speed.pictures(1)[2]}",
                )


def _loop(task: speed.Problem, device: str) -> Attempt:
    return lambda iterations: speed.plain_loop(task, iterations, device)


def _ours(task: speed.Problem, device: str, words: str) -> Attempt:
    return lambda iterations: speed.ours(task, iterations, device, speed.engine(words))


def _quality(result: dict[str, object], task: speed.Problem) -> str:
    found = result["found"]
    assert isinstance(found, Tensor)
    return f"{speed.psnr(found, task.batch):.1f} dB"
