"""`fedprism check`: what fits a model, told by its layers and by short runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def frozen():
    model = table()
    model[0].requires_grad_(False)
    return model


def broken():
    return nn.Sequential(nn.Linear(5, 2))


def sentences():
    rng = torch.Generator().manual_seed(0)
    return torch.randint(40, (40, 7), generator=rng), torch.randint(2, (40,), generator=rng)


def rows():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=rng), torch.randint(2, (40,), generator=rng)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "checked_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("checked_code", None)


def checked(model: str, data: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", f"checked_code:{model}", "--data", f"checked_code:{data}"]) == 0
    return capsys.readouterr().out


def test_a_text_model_is_read_by_its_table_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("Text", "sentences", capsys)
    assert "embedding.weight  embedding (40, 8): read by embedding-inversion" in out
    assert "head.weight  dense (2, 8): read by no closed form" in out
    assert "no attack reads: head.weight" in out
    assert "embedding-inversion: about" in out
    assert "the model is fed several tensors, or whole numbers" in out


def test_a_dense_model_is_read_in_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    out = checked("table", "rows", capsys)
    assert "0.weight  dense (16, 6): read by dense-inversion and cocktail-party" in out
    assert "dense-inversion: about" in out
    assert "no attack reads" not in out


def test_a_frozen_layer_is_not_said_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.weight  dense (16, 6): frozen, not sent" in checked("frozen", "rows", capsys)


def test_a_misfit_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "checked_code:broken", "--data", "checked_code:rows"]) == 2
    assert "expected a model that accepts inputs of shape (6,)" in " ".join(capsys.readouterr().err.split())
