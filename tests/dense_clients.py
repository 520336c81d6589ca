"""Clients that train a dense layer with a known network behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism import losses
from fedprism.defenses import Context, Defense
from fedprism.solvers import Downstream

CLASSES, SHAPE = 10, (3, 12, 12)


FEATURES = 3 * 12 * 12


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


def uniform(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """As torch initialises a dense layer: up to one over the root of its inputs."""
    return (torch.rand(rows, columns, generator=rng, dtype=torch.float64) * 2 - 1) / columns**0.5


class Products(nn.Module):
    """Two dense layers with weights (inputs, outputs): a product and a sum, and the call that GPT-2's Conv1D makes."""

    def __init__(self, inputs: int, hidden: int, classes: int, before: nn.Module | None = None) -> None:
        super().__init__()
        rng = seeded(0)
        self.before = before or nn.Identity()
        self.first = nn.Parameter(uniform(hidden, inputs, rng).T.float().contiguous())
        self.second = nn.Parameter(uniform(classes, hidden, rng).T.float().contiguous())
        self.first_bias, self.second_bias = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(classes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.before(inputs).flatten(1) @ self.first + self.first_bias)
        return torch.addmm(self.second_bias, hidden, self.second)


class Client(NamedTuple):
    downstream: Downstream
    inputs: Tensor
    """(n, d)"""
    labels: Tensor

    def gradient(self, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the layer's weight and bias, by automatic differentiation; `keep` (n, h) drops units as dropout does."""
        weight, bias = (part.clone().requires_grad_() for part in (self.downstream.weight, self.downstream.bias))
        outputs = self.inputs @ weight.T + bias
        if keep is not None:
            outputs = outputs * keep
        value = self.downstream.loss(self.downstream.network(outputs), self.labels)
        weight_grad, bias_grad = torch.autograd.grad(value, (weight, bias))
        return weight_grad, bias_grad


def hidden_layer(units: int, seed: int) -> Callable[[Tensor], Tensor]:
    """A ReLU and a dense layer to the classes."""
    rng = seeded(seed)
    weight, bias = uniform(CLASSES, units, rng), uniform(CLASSES, units, rng)[:, 0]
    return lambda outputs: torch.relu(outputs) @ weight.T + bias


def client(inputs: Tensor, labels: Tensor, units: int, seed: int = 0) -> Client:
    rng = seeded(seed)
    weight, bias = uniform(units, FEATURES, rng), uniform(units, FEATURES, rng)[:, 0]
    downstream = Downstream(network=hidden_layer(units, seed + 1), loss=losses.cross_entropy, weight=weight, bias=bias)
    return Client(downstream, inputs.double().flatten(1), labels)


def drawn(crops: fp.data.ImageSet, count: int, units: int, seed: int) -> Client:
    batch = crops.draw(count, seeded(seed))
    return client(batch.inputs, torch.randint(0, CLASSES, (count,), generator=seeded(seed)), units, seed)


def nearest(answer: Tensor, truth: Tensor) -> Tensor:
    """PSNR (n,) of whatever comes nearest to each row of the truth; minus infinity where nothing was found."""
    errors = (answer.double().unsqueeze(0) - truth.unsqueeze(1)).square().mean(2)
    if not len(answer):
        return torch.full((len(truth),), -torch.inf)
    return -10 * errors.min(1).values.clamp(min=1e-30).log10()


def altered(gradient: tuple[Tensor, Tensor], defense: Defense, seed: int) -> tuple[Tensor, Tensor]:
    """A gradient behind a defense; noise is relative to the gradient's own size."""
    size = gradient[0].square().mean().sqrt()
    sent = {"weight": gradient[0] / size, "bias": gradient[1] / size}
    left = defense.on_update(sent, Context(), seeded(seed))
    return left["weight"] * size, left["bias"] * size


def double(batch: fp.Batch) -> fp.Batch:
    return fp.Batch(batch.inputs.double(), batch.labels)
