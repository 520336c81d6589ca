"""Small models fed with whole numbers, with several tensors, and with losses of every kind: one row a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.inputs import Inputs

BATCH, WORDS, VOCABULARY = 3, 6, 17


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def tokens(*size: int, below: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(below, size, generator=torch.Generator().manual_seed(seed))


class Text(nn.Module):
    """Token embeddings; scores for the sentence, or for every token."""

    def __init__(self, classes: int = 2, per_token: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, classes)
        self.per_token = per_token

    def forward(self, words: Tensor) -> Tensor:
        embedded = torch.tanh(self.embedding(words))
        return self.head(embedded if self.per_token else embedded.mean(1))


class Table(nn.Module):
    """Numbers beside categories, by name; the answer is a dict."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(4 + 2 * 3, outputs)

    def forward(self, numbers: Tensor, categories: Tensor) -> dict[str, Tensor]:
        joined = torch.cat([numbers, self.embedding(categories).flatten(1)], 1)
        return {"hidden": joined, "logits": self.head(joined)}


class Pair(nn.Module):
    """Two tensors by position; the answer is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        both = self.shared(first), self.shared(second)
        return both[0] - both[1], both[0]


def ranking(outputs: Any, labels: Tensor) -> Tensor:
    """A loss of a user's own, on what the model returns."""
    difference, first = outputs
    return torch.nn.functional.softplus(-labels * difference.sum(1)).mean() + first.square().mean()


class Kind(NamedTuple):
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    labels: Callable[[int], Tensor]
    loss: Any


def _table(n: int) -> Inputs:
    return {"numbers": numbers(n, 4), "categories": tokens(n, 2, below=5)}


def _image(n: int) -> Inputs:
    return numbers(n, 3, 8, 8)


def _net(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, outputs))


def _one_logit() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 1))


KINDS = [
    Kind("text", Text, lambda n: tokens(n, WORDS), lambda n: tokens(n, below=2), "cross_entropy"),
    Kind(
        "per token",
        lambda: Text(3, per_token=True),
        lambda n: tokens(n, WORDS),
        lambda n: tokens(n, WORDS, below=3),
        "cross_entropy",
    ),
    Kind("dict in, dict out", Table, _table, lambda n: tokens(n, below=2), "cross_entropy"),
    Kind(
        "tuple in, own loss", Pair, lambda n: (numbers(n, 4), numbers(n, 4, seed=1)), lambda n: torch.ones(n), ranking
    ),
    Kind("one logit", _one_logit, lambda n: numbers(n, 7), lambda n: tokens(n, below=2), "binary_cross_entropy"),
    Kind("multi-label", _net(5), _image, lambda n: tokens(n, 5, below=2).float(), "binary_cross_entropy"),
    Kind("squared error", _one_logit, lambda n: numbers(n, 7), lambda n: numbers(n), "mse"),
    Kind("absolute error", _net(3), _image, lambda n: numbers(n, 3), "l1"),
    Kind("Huber's error", _net(3), _image, lambda n: numbers(n, 3), "huber"),
    Kind(
        "per pixel", lambda: nn.Conv2d(3, 4, 3, padding=1), _image, lambda n: tokens(n, 8, 8, below=4), "cross_entropy"
    ),
    Kind(
        "soft per pixel",
        lambda: nn.Conv2d(3, 4, 3, padding=1),
        _image,
        lambda n: numbers(n, 4, 8, 8).softmax(1),
        "cross_entropy",
    ),
]


def build(kind: Kind) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind.model()


def scenario(kind: Kind, *, samples: int = BATCH, **settings: Any) -> fp.Scenario:
    return fp.Scenario(
        model=build(kind),
        clients=[fp.Batch(kind.inputs(samples), kind.labels(samples))],
        loss=kind.loss,
        bounds=settings.pop("bounds", (-4.0, 4.0)),
        **settings,
    )
