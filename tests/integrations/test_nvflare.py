"""The NVFlare filter on hand-built data exchange objects, and in a job of the framework's own simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedprism as fp
from fedprism import report
from fedprism.audit import prepare, run_audit

pytest.importorskip("nvflare", reason='needs nvflare: pip install "fedprism[nvflare]"')

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from fedprism.integrations.nvflare import CaptureFilter
from fedprism.models.factory import from_factory
from fedprism.runtime.executors import Serial
from report_pages import Page

MODEL = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "layer.bias": np.ones(2, dtype=np.float32)}


class Server:
    """Passes messages through two filters, as a server does that was given one for each direction."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.contexts = FLContextManager(
            engine=None, identity_name="server", job_id="job", public_stickers={}, private_stickers={}
        )
        self.out, self.back = (CaptureFilter(str(folder), **settings) for _ in range(2))

    def context(self, direction: str) -> FLContext:
        context = self.contexts.new_context()
        context.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
        return context

    def sends(self, data: dict[str, Any], index: int) -> Shareable:
        return self.out.process(_shareable(data, DataKind.WEIGHTS, index), self.context(FilterKey.OUT))

    def receives(self, data: dict[str, Any], kind: str, index: int, client: str) -> Shareable:
        shareable = _shareable(data, kind, index)
        shareable.set_peer_props({ReservedKey.IDENTITY_NAME: client})
        return self.back.process(shareable, self.context(FilterKey.IN))

    def ends(self) -> None:
        self.back.handle_event(EventType.END_RUN, self.contexts.new_context())


def _shareable(data: dict[str, Any], kind: str, index: int) -> Shareable:
    shareable = DXO(data_kind=kind, data=data).to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, index)
    return shareable


def test_weights_and_differences_become_rounds(tmp_path: Path) -> None:
    server = Server(tmp_path / "run")
    change = {"layer.weight": np.full((2, 3), 0.25, np.float32), "layer.bias": np.array([1e-4, -0.5], np.float32)}
    server.sends(MODEL, 0)
    full = {name: MODEL[name] + change[name] for name in MODEL}
    passed = server.receives(full, DataKind.WEIGHTS, 0, "site-1")
    np.testing.assert_array_equal(passed["DXO"]["data"]["layer.weight"], full["layer.weight"])  # goes on unchanged
    server.receives(change, DataKind.WEIGHT_DIFF, 0, "../site-2")
    server.sends(full, 1)
    server.receives(change, DataKind.WEIGHT_DIFF, 1, "site-1")
    server.ends()
    observation = fp.captures.load(tmp_path / "run")
    assert [(seen.index, seen.participants) for seen in observation.rounds] == [
        (0, ("site-1",)),
        (0, ("../site-2",)),
        (1, ("site-1",)),
    ]
    for seen in observation.rounds:
        for name, expected in change.items():
            torch.testing.assert_close(seen.update[name], torch.from_numpy(expected), atol=1e-6, rtol=0)
    assert torch.equal(observation.rounds[2].params["layer.bias"], torch.from_numpy(full["layer.bias"]))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not any("site" in name for name in names), "clients' names are no file names"


def test_answers_that_cannot_be_recorded_pass_by(tmp_path: Path) -> None:
    server = Server(tmp_path / "run")
    server.receives(MODEL, DataKind.WEIGHTS, 0, "early")  # nothing is known of what was sent
    server.sends(MODEL, 0)
    server.receives({"layer.weight": np.ones((3, 3), np.float32)}, DataKind.WEIGHT_DIFF, 0, "another-shape")
    server.receives({"layer.bias": np.full(2, np.nan, np.float32)}, DataKind.WEIGHT_DIFF, 0, "not-a-number")
    server.receives({"loss": 1.0}, DataKind.METRICS, 0, "metrics")
    server.ends()
    assert not (tmp_path / "run" / "capture.json").exists()
    server.receives({"layer.bias": np.ones(2, np.float32)}, DataKind.WEIGHT_DIFF, 0, "a-part")
    server.ends()
    (seen,) = fp.captures.load(tmp_path / "run").rounds
    assert seen.participants == ("a-part",)
    assert set(seen.update) == {"layer.bias"}


def test_a_factory_tells_buffers_from_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.BatchNorm1d(2)\n")
    monkeypatch.chdir(tmp_path)
    server = Server(tmp_path / "run", model="own_model:build")
    state = {name: tensor.numpy() for name, tensor in torch.nn.BatchNorm1d(2).state_dict().items()}
    server.sends(state, 0)
    server.receives({name: value + 1 for name, value in state.items()}, DataKind.WEIGHTS, 0, "site-1")
    server.ends()
    (seen,) = fp.captures.load(tmp_path / "run").rounds
    assert set(seen.update) == {"weight", "bias"}
    assert seen.buffers_after["num_batches_tracked"] == 1


NETWORK = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)
"""
CLIENT = """
import sys

import nvflare.client as flare
import torch

import fedprism as fp
from network import Network

flare.init()
site, model = flare.get_site_name(), Network()
first = 2 * int(site.removeprefix("site-"))
batch = fp.data.load("digits").batch([first, first + 1])
while flare.is_running():
    received = flare.receive()
    model.load_state_dict(received.params)
    fp.keep_truth(sys.argv[1], batch, client=site, round=received.current_round)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    optimizer.step()
    after = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    flare.send(flare.FLModel(params=after, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""
JOB = """
import sys

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from fedprism.integrations.nvflare import CaptureFilter
from network import Network

if __name__ == "__main__":
    folder = sys.argv[1]
    recipe = FedAvgRecipe(
        name="job", model=Network(), min_clients=2, num_rounds=2, train_script="client.py",
        train_args=folder + "/truth",
    )
    known = {"input_shape": [1, 8, 8], "bounds": [0, 1], "loss": "cross_entropy", "batch_size": 2}
    known |= {"local_lr": 0.1, "local_epochs": 1, "local_batch_size": 2, "local_optimizer": {"name": "sgd"}}
    recorded = CaptureFilter(folder + "/run", model="network:Network", knowledge=known)
    recipe.add_server_output_filter(recorded, tasks=["train"])
    recipe.add_server_input_filter(recorded, tasks=["train"])
    recipe.execute(SimEnv(num_clients=2, workspace_root=folder + "/workspace"))
"""
PLAN = """
[captures]
folders = ["run"]
truths = ["truth"]
[model]
factory = "network:Network"
[grid]
attacks = ["dense-inversion"]
seeds = [0]
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job in NVFlare's simulator: a server and two sites in processes of their own, two rounds, a real training."""
    folder = tmp_path_factory.mktemp("nvflare")
    for name, text in {"network.py": NETWORK, "client.py": CLIENT, "job.py": JOB, "plan.toml": PLAN}.items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "job.py", str(folder)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (folder / "run").is_dir(), (done.stdout + done.stderr)[-3000:]
    return folder


def test_a_job_in_the_simulator_is_recorded(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recorded update is that of one step of the site on the weights that were sent."""
    monkeypatch.syspath_prepend(job)
    network = from_factory("network:Network", asked_as="model")
    observation = fp.captures.load(job / "run", model=network)
    rounds = sorted(observation.rounds, key=lambda seen: (seen.index, seen.participants))
    sites = [(0, "site-1"), (0, "site-2"), (1, "site-1"), (1, "site-2")]
    assert [(seen.index, *seen.participants) for seen in rounds] == sites
    assert not torch.equal(rounds[0].params["layers.1.weight"], rounds[2].params["layers.1.weight"]), "it was trained"
    for seen in rounds:
        first = 2 * int(seen.participants[0].removeprefix("site-"))
        batch = fp.data.load("digits").batch([first, first + 1])
        network.load_state_dict(dict(seen.params))
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(batch.inputs), batch.labels).backward()
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(seen.update[name], -0.1 * parameter.grad, atol=1e-6, rtol=0)


def test_the_recorded_job_is_audited_and_scored(job: Path, tmp_path: Path) -> None:
    audit = run_audit(prepare(job / "plan.toml"), tmp_path / "out", executor=Serial())
    assert audit.conclusion["verdict"] == "leaks"
    (outcome,) = list(audit)
    assert outcome.record is not None, outcome.reason
    assert outcome.record.scores is not None
    values = outcome.record.scores["values"]["psnr"]
    assert len(values) == 8
    assert sum(value is not None and value > 30 for value in values) >= 4
    assert {each["client"] for each in outcome.record.updates} == {"site-1", "site-2"}
    page = Page(report.write(tmp_path / "out").read_text())
    assert "private samples were recovered (dense-inversion" in page.text


def test_a_filter_is_told_what_attacks_need(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = {"input_shape": [1, 2, 3], "loss": "mse", "batch_size": 1, "bounds": [0, 1], "local_lr": 0.1}
    known |= {"local_epochs": 1, "local_batch_size": 1, "local_optimizer": {"name": "adam"}}
    server = Server(tmp_path / "run", knowledge=known)
    server.sends(MODEL, 0)
    server.receives(MODEL, DataKind.WEIGHTS, 0, "site-1")
    server.ends()
    told = fp.captures.load(tmp_path / "run").knowledge
    assert (told.input_shape, told.loss, told.local_lr, told.local_optimizer) == (
        (1, 2, 3),
        "mse",
        0.1,
        fp.optimizers.Adam(),
    )
    assert "does not tell" not in caplog.text
    with pytest.raises(fp.FedprismError, match="is not valid"):
        CaptureFilter(str(tmp_path / "other"), knowledge={"imput_shape": [1]})


def test_nothing_that_a_filter_does_ends_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path / "run")
    sent = server.sends({"words": np.array(["no", "numbers"])}, 0)
    assert list(sent["DXO"]["data"]) == ["words"]
    server.sends(MODEL, 1)

    def planted(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("fedprism.integrations.nvflare.Recording", planted)
    answer = server.receives(MODEL, DataKind.WEIGHTS, 1, "site-1")
    assert list(answer["DXO"]["data"]) == list(MODEL)
