"""How many samples of a batch gradient matching works on at a time, so that memory holds what is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.attacks.forward import QuickForward, changes_updates
from fedprism.parts import bytes_kept, part_size
from fedprism.types import Batch

Passes: TypeAlias = Callable[[Tensor, Tensor], object]
"""What is made of inputs and labels to be differentiated."""
GPU_SHARE = 0.7
"""Of a GPU's memory, where nobody says how much there is to be used."""
SMALL = 2**20
"""Batches of fewer input values are not looked at: networks keep some thousand bytes for each of them."""
PARAMETER_COPIES = 8
"""Parameters, target, gradient and slope, the last three also as one vector, and one to spare."""
INPUT_COPIES = 9
"""Of the whole batch however few samples are worked on: itself, Adam's two, the best so far, slopes on their way."""
PASSING = 1.5
"""What is held at once over what is kept to be differentiated: values on their way through the last pass."""


class Together(NamedTuple):
    samples: int
    note: str = ""
    """Where it is not simply the whole batch, what was done and why."""


def samples_together(
    quick: QuickForward, batch: Batch, memory: int | None, *, passes: Passes | None = None, coupled: bool = False
) -> Together:
    """The whole batch where `memory` bytes hold it, else as many samples as they hold; `coupled` ones stay together.

    `passes`: what is differentiated, where that is not the gradient.
    Without `memory` it is GPU_SHARE of a GPU's, and all that is asked for on a CPU. Samples are worked on apart only
    where the gradient is the mean of theirs.
    """
    size, fitting = len(batch), _fitting(quick, batch, memory, passes or quick)
    whole = coupled or not quick.direct or changes_updates(quick.forward.defense)
    together = size if whole else part_size(lambda some: quick(some.inputs, some.labels), batch, fitting)
    if together < size:
        return Together(together, f"{together} of the {size} samples at a time, to save memory")
    if fitting < size:
        return Together(size, "the whole batch at once, although memory may not hold it: its gradient is no plain mean")
    return Together(size)


def _fitting(quick: QuickForward, batch: Batch, memory: int | None, passes: Passes) -> int:
    """How many samples fit, at least one."""
    device, size = batch.inputs.device, len(batch)
    if size == 1:
        return size
    if memory is None:
        if device.type != "cuda" or batch.inputs.numel() < SMALL:
            return size
        memory = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    params = sum(tensor.nbytes for tensor in quick.params.values())
    left = memory - PARAMETER_COPIES * params - INPUT_COPIES * batch.inputs.nbytes
    return max(1, min(size, int(left / (PASSING * bytes_a_sample(quick, batch, passes)))))


def bytes_a_sample(quick: QuickForward, batch: Batch, passes: Passes) -> float:
    """What autograd keeps for each sample until the passes have been differentiated, counted on two of them."""
    few = batch[:2]
    inputs = torch.zeros(few.inputs.shape, dtype=few.inputs.dtype, device=few.inputs.device, requires_grad=True)
    there = [*quick.params.values(), *quick.trained.values()]
    return max(1, bytes_kept(lambda: passes(inputs, few.labels), there)) / len(few)
