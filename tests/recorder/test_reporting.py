"""`recorder.report()`: from what was recorded to a page, with README's own text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks import ATTACKS, GradientMatching, inverting_gradients
from fedprism.errors import BadInput
from report_pages import Page

DIGITS = fp.data.load("digits")
RATE = 0.1
ROOT = Path(__file__).parents[2]


def dense() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=64, classes=10, seed=0)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 10))


def answered(build: Callable[[], nn.Module], steps: int = 1, loss: Any = nn.functional.cross_entropy) -> dict[str, Any]:
    """What two clients with one digit each send back."""
    received = {}
    for client in (0, 1):
        model, batch = build(), DIGITS.batch([client])
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(batch.inputs), batch.labels).backward()
            optimizer.step()
        received[str(client)] = (model.state_dict(), 1)
    return received


def recorded(folder: Path, build: Callable[[], nn.Module], **settings: Any) -> fp.Recorder:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    given = {"sample": DIGITS.batch([0]).inputs, "loss": nn.CrossEntropyLoss(), "optimizer": optimizer, **settings}
    recorder = fp.record(folder, model=model, **given)
    recorder.round(sent=model, received=answered(build, loss=given["loss"]))
    return recorder


def results(page: Path) -> dict[str, Any]:
    return dict(json.loads((page.parent / "results.json").read_text()))


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    return addresses


def test_a_recording_is_audited_and_the_page_is_opened(tmp_path: Path, opened: list[str]) -> None:
    recorder = recorded(tmp_path / "run", dense)
    page = recorder.report()
    assert opened == [page.resolve().as_uri()]
    assert page.parent == tmp_path / "run-report"
    assert results(page)["conclusion"]["verdict"] == "leaks"
    assert recorder.report(open_page=False).parent == tmp_path / "run-report-2"
    assert len(opened) == 1
    shown = recorder.report(show_images=True, attacks=["dense-inversion"], folder=tmp_path / "shown", open_page=False)
    assert "data:image/png" in shown.read_text()
    assert "data:image/png" not in page.read_text()


def test_what_is_not_told_is_tried_and_the_report_says_what_was_assumed(tmp_path: Path) -> None:
    page = recorded(tmp_path / "run", dense).report()
    by_assumption = {row["configuration"]["capture"]: row["residual"] for row in results(page)["summary"]}
    assert by_assumption["1: run, assuming local_batch_size=1 and local_epochs=1"] < 1e-5
    assert by_assumption["1: run, assuming local_batch_size=1 and local_epochs=5"] > 0.1, "the update tells"
    text = Page(page.read_text()).text
    assert "assuming local_batch_size=1 and local_epochs=1" in text
    assert "knowledge = { bounds = [0.0, 1.0], local_epochs = 1, local_batch_size = 8 }" in text


def test_what_is_told_is_not_assumed(tmp_path: Path) -> None:
    known = fp.Knowledge(local_epochs=1, local_batch_size=1)
    page = recorded(tmp_path / "run", dense, knowledge=known).report(attacks=["dense-inversion"])
    (row,) = results(page)["summary"]
    assert row["configuration"]["capture"] == "1: run"


def test_a_loss_of_ones_own_is_used_by_the_audit(tmp_path: Path) -> None:
    def own(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.2)

    known = fp.Knowledge(local_epochs=1, local_batch_size=1)
    page = recorded(tmp_path / "run", dense, loss=own, knowledge=known).report(attacks=["dense-inversion"])
    (row,) = results(page)["summary"]
    assert "loss" in row["knowledge_used"]
    assert row["outcomes"] == {"done": 1}


def test_a_recording_without_updates_is_one_sentence(tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=dense())
    with pytest.raises(BadInput, match="no client answered"):
        recorder.report()
    recorder.round(sent=dense(), received={"a": ({"other": torch.ones(2)}, 1)})
    with pytest.raises(BadInput, match="no recorded updates"):
        recorder.report()


def readme_snippet() -> str:
    """The text between the fences, as somebody copies it."""
    (snippet,) = re.findall(r"```python\n([^`]*fp\.record\([^`]*)```", (ROOT / "README.md").read_text())
    return str(snippet)


def test_the_text_of_the_readme_ends_in_a_report_of_a_convolutional_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    """Word for word. Only the search is shortened: what it finds is not the question here."""
    pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from flower_runs import LocalGrid, message_app

    app = message_app(build=convolutional)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}), reply_to=message)

    monkeypatch.chdir(tmp_path)

    def short(**settings: Any) -> GradientMatching:
        return inverting_gradients(**{**settings, "iterations": 10})

    monkeypatch.setitem(ATTACKS, "inverting-gradients", short)
    monkeypatch.setattr("fedprism.attacks.gradient_matching.presets.inverting_gradients", short)
    model = convolutional()
    names = {
        "model": model,
        "x": DIGITS.batch([0, 1]).inputs,
        "optimizer": torch.optim.SGD(model.parameters(), lr=RATE),
        "grid": LocalGrid(app, 2),
        "FedAvg": FedAvg,
        "ArrayRecord": ArrayRecord,
    }
    exec(compile(readme_snippet(), "README.md", "exec"), names)
    (address,) = opened
    assert address.endswith("/captures-report/report.html")
    told = results(tmp_path / "captures-report" / "report.html")
    assert told["conclusion"]["verdict"] != "not tested"
    assert all(row["outcomes"] == {"done": 1} for row in told["summary"])
    assert any("assuming" in row["configuration"]["capture"] for row in told["summary"])
