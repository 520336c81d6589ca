"""`fedprism check`: what fits a model, told by its layers and by short runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedprism.audit import estimate
from fedprism.cli import main

CODE = """
import torch
from torch import nn


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 2)

    def forward(self, words):
        return self.head(torch.tanh(self.embedding(words)).mean(1))


def table():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(5, 3), nn.Linear(4 + 2 * 3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, numbers, categories):
        return self.head(torch.relu(self.dense(torch.cat([numbers, self.embedding(categories).flatten(1)], 1))))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, one, other):
        return torch.tanh(self.first(one)) * self.second(other)


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 36, 2))


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 2)

    def forward(self, rows):
        with torch.no_grad():
            return self.dense(rows)


def frozen():
    model = table()
    model[0].requires_grad_(False)
    return model


def broken():
    return nn.Sequential(nn.Linear(5, 2))


def sentences():
    rng = torch.Generator().manual_seed(0)
    return torch.randint(40, (40, 7), generator=rng), torch.randint(2, (40,), generator=rng)


def mixed():
    rng = torch.Generator().manual_seed(0)
    inputs = {"numbers": torch.rand(40, 4, generator=rng), "categories": torch.randint(5, (40, 2), generator=rng)}
    return inputs, torch.randint(2, (40,), generator=rng)


def two():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 4, generator=rng), torch.rand(40, 2, generator=rng)
    return inputs, torch.randint(2, (40,), generator=rng)


def pictures():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(40, 1, 8, 8, generator=rng), torch.randint(2, (40,), generator=rng)


def rows():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=rng), torch.randint(2, (40,), generator=rng)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "checked_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "PATIENCE", 600.0)  # a busy machine must not change what is said
    yield
    sys.modules.pop("checked_code", None)


def checked(model: str, data: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", f"checked_code:{model}", "--data", f"checked_code:{data}"]) == 0
    return capsys.readouterr().out


def test_a_text_model_is_read_by_its_table_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("Text", "sentences", capsys)
    assert "embedding.weight  embedding (40, 8): read by embedding-inversion" in out
    assert "head.weight  dense (2, 8): read by no exact attack" in out
    assert "no attack reads: head.weight" in out
    assert "embedding-inversion: about" in out
    assert "the model's input is several tensors, or whole numbers" in out


def test_a_dense_model_is_read_in_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("table", "rows", capsys)
    assert "0.weight  dense (16, 6): read by dense-inversion and cocktail-party" in out
    assert "dense-inversion: about" in out
    assert "no attack reads" not in out


def test_a_frozen_layer_is_not_said_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.weight  dense (16, 6): frozen, not sent" in checked("frozen", "rows", capsys)


def test_a_misfit_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "checked_code:broken", "--data", "checked_code:rows"]) == 2
    assert "the model does not accept the inputs of client 0, of shape (6,)" in " ".join(
        capsys.readouterr().err.split()
    )


def test_numbers_beside_categories_are_said_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("Mixed", "mixed", capsys)
    assert "embedding.weight  embedding (5, 3): read by embedding-inversion" in out
    assert "dense.weight  dense (8, 10): read by embedding-inversion" in out
    assert "no attack reads: head.weight" in out


def test_a_model_that_no_attack_fits_is_described_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("Two", "two", capsys)
    assert "input inputs.0 (float32) and inputs.1 (float32)" in out
    assert "attacks that fit:" in out


def test_what_does_not_fit_is_not_said_to_read_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("cnn", "pictures", capsys)
    assert "row-space-inversion: the input feeds no layer of this model at fewer places" in out
    assert "0.weight  convolution (2, 1, 3, 3): read by no exact attack" in out


def test_what_breaks_in_a_short_run_is_not_called_slow(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("Silent", "rows", capsys)
    assert "dense-inversion: the loss does not depend on trained parameters" in out
    assert "too long to measure" not in out
    assert "attacks that fit:\n  none\n" in out
