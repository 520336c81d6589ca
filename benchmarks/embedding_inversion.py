"""Tokens of texts and cells of tables, read off the gradients of the tables they are looked up in.

    python benchmarks/embedding_inversion.py [--sentences 100] [--draws 25]

Texts are sentences of this project's own pages, a vocabulary of their words; models a bag of words, a recurrent network
and a transformer with padding and positions, all with random weights, batches of 1 to 32. Tables are patients of
scikit-learn's breast cancer data: six measurements as numbers, four binned into categories, batches of 1 to 8.
Writes benchmarks/results/embedding_inversion.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import fedprism as fp

ROOT = Path(__file__).parents[1]
LENGTH, WIDTH, CLASSES, PADDING = 24, 64, 4, 0
TEXT_BATCHES, TABLE_BATCHES = (1, 4, 16, 32), (1, 2, 4, 8)
NUMBERS, CATEGORIES, BINS = 6, 4, 8


class Bag(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(words, WIDTH, padding_idx=PADDING)
        self.head = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Recurrent(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, WIDTH, padding_idx=PADDING)
        self.cells, self.head = nn.LSTM(WIDTH, 128, batch_first=True), nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.table(tokens))[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, WIDTH, padding_idx=PADDING)
        self.position, self.head = nn.Embedding(LENGTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        fed = self.table(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(fed, src_key_padding_mask=tokens == PADDING).mean(1))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(BINS, 4) for _ in range(CATEGORIES))
        self.body = nn.Sequential(nn.Linear(NUMBERS + 4 * CATEGORIES, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        looked_up = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        return self.body(torch.cat([numbers, *looked_up], 1))


def sentences(count: int) -> tuple[Tensor, int]:
    """Sentences of the long studies as tokens, padded or cut to one length, and how many words there are."""
    text = " ".join(page.read_text() for page in sorted((ROOT / "research").glob("*.md")))
    found = [re.findall(r"[a-z]+", sentence.lower()) for sentence in re.split(r"[.!?:]\s", text)]
    texts = [words[:LENGTH] for words in found if len(words) >= LENGTH // 3]
    vocabulary = {word: 1 + number for number, word in enumerate(sorted({word for words in texts for word in words}))}
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:count].tolist()
    tokens = torch.full((len(chosen), LENGTH), PADDING)
    for row, number in enumerate(chosen):
        tokens[row, : len(texts[number])] = torch.tensor([vocabulary[word] for word in texts[number]])
    return tokens, 1 + len(vocabulary)


def patients() -> fp.Batch:
    data, labels = load_breast_cancer(return_X_y=True)
    numbers = (data - data.mean(0)) / data.std(0)
    edges = np.quantile(data[:, NUMBERS : NUMBERS + CATEGORIES], np.linspace(0, 1, BINS + 1)[1:-1], axis=0)
    binned = np.stack([np.digitize(data[:, NUMBERS + place], edges[:, place]) for place in range(CATEGORIES)], 1)
    inputs = torch.tensor(numbers[:, :NUMBERS], dtype=torch.float32), torch.tensor(binned)
    return fp.Batch(inputs, torch.tensor(labels))


def text_rows(count: int) -> Iterator[dict[str, object]]:
    tokens, words = sentences(count)
    labels = torch.randint(0, CLASSES, (len(tokens),), generator=torch.Generator().manual_seed(1))
    for kind in (Bag, Recurrent, Transformer):
        for size in TEXT_BATCHES:
            batches = [fp.Batch(tokens[i : i + size], labels[i : i + size]) for i in range(0, len(tokens), size)]
            yield {"kind": kind.__name__, "batch": size, **attacked(lambda: kind(words), batches)}  # noqa: B023


def table_rows(draws: int) -> Iterator[dict[str, object]]:
    data = patients()
    for size in TABLE_BATCHES:
        rng = torch.Generator().manual_seed(size)
        batches = [data[torch.randperm(len(data), generator=rng)[:size]] for _ in range(draws)]
        yield {"kind": "Table", "batch": size, **attacked(Table, batches)}


def attacked(kind: Callable[[], nn.Module], batches: list[fp.Batch]) -> dict[str, object]:
    values: dict[str, list[float]] = {}
    exact, seconds = 0, 0.0
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        scenario = fp.Scenario(model=kind(), clients=[batch], bounds=(-4.0, 12.0))
        observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=seed)
        start = time.perf_counter()
        answer = fp.run(fp.attacks.embedding_inversion(), observation, seed=seed)
        seconds += time.perf_counter() - start
        exact += "explain the whole update" in answer.status
        for name, each in fp.score(answer, truth).values.items():
            values.setdefault(name, []).extend(0.0 if value is None else value for value in each)
    kept = ("tokens", "tokens-in-place", "psnr")
    means = {name: statistics.mean(values[name]) for name in kept if name in values}
    least = {f"least {name}": min(values[name]) for name in kept if name in values}
    return {**means, **least, "certified": exact / len(batches), "seconds": seconds / len(batches)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--draws", type=int, default=25)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "embedding_inversion.json")
    args = parser.parse_args()
    rows = []
    for row in itertools.chain(text_rows(args.sentences), table_rows(args.draws)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
