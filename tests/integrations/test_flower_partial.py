"""Rounds in which only a part of the model travels (LoRA adapters), and rounds in which clients are missing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedprism.audit import Setup, checked_plan, lay_out
from fedprism.errors import BadCapture
from fedprism.integrations.facts import read_facts
from fedprism.integrations.findings import load_findings
from flower_runs import RATE, LocalGrid, averaging, batch_of, client_number, message_app, recorded, small_model, start

KNOWN = fp.Knowledge(local_epochs=1, local_batch_size=2, bounds=(0.0, 1.0))


class LoRA(nn.Module):
    """A frozen dense layer beside two thin ones that are trained."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)  # as LoRA starts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return adapted


def pretrained() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), LoRA(64, 32), nn.ReLU(), LoRA(32, 10))


def adapters(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: tensor for name, tensor in model.state_dict().items() if "lora" in name})


def adapter_app() -> ClientApp:
    """A client that is sent adapters and sends adapters back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, batch = pretrained(), batch_of(int(context.node_config["partition-id"]))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": len(batch)})
        return Message(RecordDict({"arrays": adapters(model), "metrics": metrics}), reply_to=message)

    return app


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fp.Recorder:
    model = pretrained()
    recorder = fp.record(
        tmp_path / "run",
        model=model,
        sample=torch.zeros(1, 1, 8, 8),
        loss="cross_entropy",
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        knowledge=KNOWN,
        watch=fp.integrations.Watch(),
        strict=True,
    )
    recorder.wrap(averaging(3)).start(LocalGrid(adapter_app(), 3), adapters(model), num_rounds=2)
    monkeypatch.setattr("webbrowser.open", lambda address: None)
    return recorder


def test_a_round_of_adapters_is_recorded_and_attacked(adapted: fp.Recorder) -> None:
    folder, model = adapted.folder, pretrained()
    observation = fp.captures.load(folder, model=model)
    first = observation.rounds[0]
    assert set(first.update) == {name for name in model.state_dict() if "lora" in name}
    assert set(first.params) == set(model.state_dict()), "frozen parts are those of the model that is given"
    assert torch.equal(first.params["1.base.weight"], model[1].base.weight)
    assert bool((first.update["1.lora_a.weight"] == 0).all()), "so long as the second adapter is zero"
    found = fp.run(fp.attacks.cocktail_party(), observation, seed=0)
    alone = [pair for pair in found.per_update[3:] if pair[0].knowledge.batch_size == 1]
    assert len(alone) == 2
    for part, answer in alone:  # of one sample the row space of the first adapter's gradient is its direction
        inputs = batch_of(client_number(part.subject)).inputs
        assert float(nn.functional.cosine_similarity(answer.inputs.flatten(1), inputs.flatten(1)).abs()) > 0.999
    attacks = {cell.attack.label for cell in lay_out(plan_of(folder)).cells}  # type: ignore[union-attr]
    assert {"cocktail-party", "inverting-gradients"} <= attacks, "closed forms alone leave signs and labels open"


def plan_of(folder: Path) -> Setup:
    plan = checked_plan({"captures": {"folders": [folder.name]}, "grid": {"seeds": [0]}})
    return Setup(plan, folder.parent, model=pretrained())


def test_a_report_of_adapters_says_where_the_frozen_part_is_from(adapted: fp.Recorder) -> None:
    (finding,) = [each for each in load_findings(adapted.folder) if each.check == "parts-unsent"]
    assert "in 2 of 2 rounds 4 parameters of the model were not sent" in finding.sentence
    page = adapted.report(attacks=["cocktail-party"], open_page=False)
    assert "4 parameters of the model were not sent" in page.read_text()
    with pytest.raises(BadCapture, match="Give the model that was trained"):
        fp.captures.load(adapted.folder, model=small_model())


@pytest.mark.parametrize("every_round", [True, False])
def test_clients_that_drop_out_are_counted(every_round: bool, tmp_path: Path, caplog: Any) -> None:
    grid = LocalGrid(message_app(), 4, broken=[2])
    if not every_round:
        answer = grid._answer
        grid._answer = lambda message: (  # type: ignore[method-assign]
            setattr(grid, "breaks_at", "" if str(message.content["config"]["server-round"]) == "2" else "never")
            or answer(message)
        )
    strategy = averaging(4)
    start(recorded(strategy, tmp_path / "run", model=small_model(), knowledge=fp.Knowledge()), grid, rounds=3)
    missing = 3 if every_round else 1
    assert len(fp.captures.load(tmp_path / "run", model=small_model()).rounds) == 12 - missing
    assert [len(facts.replied) for facts in read_facts(tmp_path / "run")] == ([3] * 3 if every_round else [4, 3, 4])
    (finding,) = [each for each in load_findings(tmp_path / "run") if each.check == "clients-silent"]
    assert f"{missing} of 12 answers that the server asked for did not come" in finding.sentence
    assert logging.WARNING not in {record.levelno for record in caplog.records if "goes on without" in record.message}
