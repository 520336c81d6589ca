"""Honest models of further kinds for `inspection.py`: such as were accused before a rule was changed, and their like.

Logistic regression from zeros and fine-tuning by low-rank additions leave rows that agree, because what starts at zero
goes where the first gradients point; an L1 penalty leaves rows of few entries; torch's pruning stores masks of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from inspected_models import Cell, chain, digits, tensors
from torch import Tensor, nn
from torch.nn.utils import prune

from fedprism.randomness import generator
from fedprism.types import Update

FAMILY = "other kinds"


class LowRank(nn.Module):
    """A frozen dense layer with a product of two thin ones beside it, the second of which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.lora_B(self.lora_A(inputs))


class Attention(nn.Module):
    """A transformer over 16 patches, with a mask of minus infinity and sines for positions, as buffers."""

    def __init__(self, width: int = 64, patches: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        angles = torch.outer(torch.arange(patches), 10000 ** -torch.linspace(0, 1, width // 2))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(patches))

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.embed(F.unfold(inputs, 8, stride=8).transpose(1, 2)) + self.positions
        return self.head(self.layers(patches, mask=self.mask, is_causal=True).mean(1))


def dense(*widths: int) -> nn.Sequential:
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def from_zeros(classes: int) -> nn.Module:
    model = dense(3072, classes)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def low_rank(rank: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), LowRank(nn.Linear(3072, 256), rank), nn.ReLU(), nn.Linear(256, 10))


def fitted(
    build: Callable[[], nn.Module], steps: int, *, penalty: float = 0.0, classes: int = 10, rate: float = 1e-3
) -> Callable[[int], Update]:
    """Trained on digits by Adam, whose labels are cut to `classes`."""

    def make(seed: int) -> Update:
        data, rng = digits(), generator(seed, "other kinds")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=rate)
        for _ in range(steps):
            batch = data[torch.randint(len(data), (32,), generator=rng)]
            loss = F.cross_entropy(model(batch.inputs), batch.labels.clamp(max=classes - 1))
            loss = loss + penalty * sum(parameter.abs().sum() for parameter in trained)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return tensors(model)

    return make


def with_masks(cut: Callable[[nn.Module], object]) -> Callable[[int], Update]:
    """Pruned by torch's own tool, with the masks still in place; the classes are kept."""

    def make(seed: int) -> Update:
        model = chain(seed)
        for layer in [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][:-1]:
            cut(layer)
        return tensors(model)

    return make


def positive(seed: int) -> Update:
    """Weights drawn between 0 and 1: torch's `uniform_` without arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = dense(784, 128, 64, 10)
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.uniform_(layer.weight)
    return tensors(model)


def other_kinds(steps: int) -> Iterator[Cell]:
    for share in (0.1, 0.2, 0.5):
        units = partial(prune.ln_structured, name="weight", amount=share, n=2, dim=0)
        yield Cell(FAMILY, f"masks, {share:.0%} of the units", with_masks(units))
        entries = partial(prune.l1_unstructured, name="weight", amount=share)
        yield Cell(FAMILY, f"masks, {share:.0%} of the entries", with_masks(entries))
    for rank, count in product((8, 32, 64), (1, steps)):
        yield Cell(FAMILY, f"low rank {rank}, {count} steps", fitted(lambda r=rank: low_rank(r), count))
    for classes, count in product((10, 62), (1, steps)):
        label = f"from zeros, {classes} classes, {count} steps"
        yield Cell(FAMILY, label, fitted(lambda c=classes: from_zeros(c), count))
    for penalty in (1e-4, 3e-4, 1e-3):
        make = fitted(lambda: dense(3072, 64, 64, 10), 5 * steps, penalty=penalty, rate=3e-3)
        yield Cell(FAMILY, f"L1 penalty {penalty:g}", make)
    for classes in (2, 3):
        make = fitted(lambda c=classes: dense(3072, 16, 16, c), steps, classes=classes)
        yield Cell(FAMILY, f"{classes} classes", make)
    yield Cell(FAMILY, "transformer", fitted(Attention, steps))
    yield Cell(FAMILY, "positive weights", positive)
