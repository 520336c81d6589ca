"""How many samples of a batch gradient matching works on at a time, so that memory holds what is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.attacks.gradient_matching.forward import PreparedForward
from fedprism.client.batch_parts import bytes_kept, part_size
from fedprism.types import Batch

Passes: TypeAlias = Callable[[Tensor, Tensor], object]
"""Whatever is computed from inputs and labels to be differentiated."""
GPU_SHARE = 0.7
"""Fraction of a GPU's memory to use where nobody says how much."""
MEASURED_INPUTS = 2**20
"""Input values of a batch below which nothing is measured on a GPU: networks keep some thousand bytes per value."""
PARAMETER_COPIES = 8
"""Bound: parameters, target, gradient and slope, the last three also as one vector, and one to spare."""
INPUT_COPIES = 9
"""Bound, of the whole batch: itself, Adam's two, the best so far, slopes on their way."""
PEAK_RATIO = 1.5
"""Bound: bytes at the peak over bytes kept for differentiation; the rest are values of the last pass."""


class Together(NamedTuple):
    samples: int | None
    """How many samples to work on at a time; None: the whole batch."""
    note: str = ""
    """Why it is not the whole batch, or why it is although memory may be short."""


def samples_together(
    prepared: PreparedForward, batch: Batch, memory: int | None, *, passes: Passes | None = None, coupled: bool = False
) -> Together:
    """As many samples as `memory` bytes hold, where the batch's gradient is the mean of theirs, else the whole batch.

    memory: None means GPU_SHARE of a GPU's, unlimited on a CPU. passes: what is differentiated, if not the gradient.
    coupled: samples have to stay together.
    """
    size, fitting = len(batch), _fitting(prepared, batch, memory, passes or prepared)
    whole = coupled or not prepared.direct or prepared.forward.defense.overrides("on_update")
    together = size if whole else part_size(lambda chunk: prepared(chunk.tensor, chunk.labels), batch, fitting)
    if together < size:
        return Together(together, f"{together} of the {size} samples at a time, to save memory")
    if fitting < size:
        return Together(None, "the whole batch at once, although memory may not hold it: its gradient is no plain mean")
    return Together(None)


def _fitting(prepared: PreparedForward, batch: Batch, memory: int | None, passes: Passes) -> int:
    """How many samples fit, at least one."""
    device, size = batch.tensor.device, len(batch)
    if size == 1:
        return size
    if memory is None:
        if device.type != "cuda" or batch.tensor.numel() < MEASURED_INPUTS:
            return size
        memory = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    params = sum(tensor.nbytes for tensor in prepared.params.values())
    left = memory - PARAMETER_COPIES * params - INPUT_COPIES * batch.tensor.nbytes
    return max(1, min(size, int(left / (PEAK_RATIO * bytes_per_sample(prepared, batch, passes)))))


def bytes_per_sample(prepared: PreparedForward, batch: Batch, passes: Passes) -> float:
    """Bytes per sample that autograd keeps until the passes have been differentiated, measured on two samples."""
    few = batch[:2]
    inputs = torch.zeros(few.tensor.shape, dtype=few.tensor.dtype, device=few.tensor.device, requires_grad=True)
    params = [*prepared.params.values(), *prepared.trained.values()]
    return max(1, bytes_kept(lambda: passes(inputs, few.labels), params)) / len(few)
