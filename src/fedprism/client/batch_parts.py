"""Compute a batch's gradient in chunks when memory is short and the gradient is a per-sample mean.

It is no such mean where samples see each other (batch norm in train mode), where layers draw random numbers, and where
a loss adds samples up. Checked at run time on two random samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedprism.errors import BadInput, out_of_memory
from fedprism.inputs import first_tensor
from fedprism.runtime import memory
from fedprism.runtime.cuda_graphs import Engine
from fedprism.types import Batch

Gradient = Callable[[Batch], Sequence[Tensor]]
TOLERANCE = 1e-3
"""Allowed error relative to the gradient's length: rounding stays far below, samples that see each other far above."""


def part_size(gradient: Gradient, batch: Batch, fitting: int | None = None) -> int:
    """How many samples of the batch to work on at a time: all, unless memory is short and the gradient is a mean."""
    usual = len(batch) if fitting is None else min(fitting, len(batch))
    if (memory.is_limited() or usual < len(batch)) and not is_mean_over_samples(gradient, batch):
        return len(batch)
    return memory.together(usual)


def bytes_kept(work: Callable[[], object], apart_from: Iterable[Tensor]) -> int:
    """What autograd keeps of the work until it has been differentiated, apart from tensors that are there anyway."""
    known_storages = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known_storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that its own node kept would stay in memory, and so would the whole graph

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        done = work()
    del done  # until here, so that no address is given away twice
    return sum(kept.values())


def is_mean_over_samples(gradient: Gradient, batch: Batch) -> bool:
    """Whether the gradient of two samples is the mean of theirs; they are random, with the labels of the first two.

    Whole numbers are those of the first two samples: not every number is a token or a category of the model.
    """
    if len(batch) < 2:
        return False
    rng = torch.Generator().manual_seed(0)
    two, place = batch[:2].map(lambda tensor: _noise(tensor, rng)), first_tensor(batch.inputs).device
    try:
        # In full precision: the 10 bits of TF32 are no better than the tolerance.
        with Engine().settings(), torch.random.fork_rng([place] if place.type == "cuda" else []):
            both, first, second = ([tensor.detach() for tensor in gradient(each)] for each in (two, two[:1], two[1:]))
    except (BadInput, RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        return False  # batch norm refuses a single sample
    missed = sum((w - (a + b) / 2).double().square().sum() for w, a, b in zip(both, first, second, strict=True))
    total = sum(w.double().square().sum() for w in both)
    return bool(missed <= TOLERANCE**2 * total)


def _noise(tensor: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=rng).to(tensor) if tensor.is_floating_point() else tensor
