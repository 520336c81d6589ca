"""Plans whose model, data and loss are a user's own code, of any inputs and labels."""

from __future__ import annotations

import json
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
        return {"logits": self.head(torch.tanh(self.embedding(words)).mean(1))}


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows))).squeeze(1)


class Broken(Table):
    def forward(self, rows):
        return {}["nothing"]


def sentences():
    rng = torch.Generator().manual_seed(0)
    return torch.randint(40, (60, 7), generator=rng), torch.randint(2, (60,), generator=rng)


def rows():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(60, 6, generator=rng), torch.rand(60, generator=rng)


def nothing():
    return 7


def own_loss(outputs, labels):
    return (outputs - labels).square().mean()


def broken_loss(outputs, labels):
    return outputs.nowhere
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own_code.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("own_code", None)


def plan(folder: Path, model: str, data: str, *, loss: str = "cross_entropy", attacks: str = "") -> Path:
    path = folder / "plan.toml"
    path.write_text(
        f"""
[model]
factory = "own_code:{model}"
[data]
factory = "own_code:{data}"
[grid]
batch_sizes = [1]
losses = ["{loss}"]
threats = ["honest_but_curious"]
seeds = [0]
{attacks}
"""
    )
    return path


def records(folder: Path) -> list[dict[str, object]]:
    results = json.loads((folder / "audit" / "results.json").read_text())
    rows: list[dict[str, object]] = results["cells"] if "cells" in results else results["rows"]
    return rows


def test_a_text_model_is_audited_by_what_reads_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan(folder, "Text", "sentences")
    code = main(["audit", str(path), "-o", str(folder / "audit"), "-v"])
    out = capsys.readouterr()
    assert code in (0, 1), out.err
    assert "embedding-inversion" in out.out
    assert "bug" not in out.err


def test_a_loss_of_ones_own_trains_the_model_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attacks = 'attacks = [{ name = "dense-inversion" }, { name = "inverting-gradients", iterations = 30 }]'
    path = plan(folder, "Table", "rows", loss="own_code:own_loss", attacks=attacks)
    code = main(["audit", str(path), "-o", str(folder / "audit")])
    out = capsys.readouterr()
    assert code in (0, 1), out.err
    assert "own_code:own_loss" in (folder / "audit" / "results.json").read_text()


def test_a_dry_run_tells_what_cannot_run_and_does_not_price_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(folder, "Text", "sentences", attacks='attacks = ["inverting-gradients"]')
    assert main(["audit", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 x  cannot run: gradient-matching needs a model with one input tensor" in out
    assert "about 1 s" in out


@pytest.mark.parametrize(
    ("model", "data", "loss", "words"),
    [
        ("Broken", "rows", "own_code:own_loss", "KeyError: 'nothing', in own_code.py, line"),
        ("Table", "nothing", "own_code:own_loss", "data.factory own_code:nothing must return inputs"),
        ("Table", "rows", "own_code:broken_loss", "in own_code.py, line"),
        ("Table", "rows", "own_code:missing_loss", "own_code:missing_loss"),
        ("Table", "rows", "no_loss", "no loss is called"),
    ],
)
def test_errors_of_ones_own_code_are_one_sentence(
    model: str, data: str, loss: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(plan(folder, model, data, loss=loss)), "-o", str(folder / "audit")]) == 2
    err = capsys.readouterr().err
    assert words in " ".join(err.split())
    assert "bug" not in err
