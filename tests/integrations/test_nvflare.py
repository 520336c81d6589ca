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

pytest.importorskip("nvflare", reason='needs nvflare: pip install "fedprism[nvflare]"')

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from fedprism.integrations.nvflare import CaptureFilter

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


CLIENT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    after = {name: value + 0.5 for name, value in received.params.items()}
    flare.send(flare.FLModel(params=after, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""
JOB = """
import sys

from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv

from fedprism.integrations.nvflare import CaptureFilter

if __name__ == "__main__":
    recipe = NumpyFedAvgRecipe(
        name="job", model=[[1.0, 2.0], [3.0, 4.0]], min_clients=2, num_rounds=2, train_script="client.py"
    )
    recipe.add_server_output_filter(CaptureFilter(sys.argv[1] + "/run"), tasks=["train"])
    recipe.add_server_input_filter(CaptureFilter(sys.argv[1] + "/run"), tasks=["train"])
    recipe.execute(SimEnv(num_clients=2, workspace_root=sys.argv[1] + "/workspace"))
"""


def test_a_job_in_the_simulator_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "job.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "run").is_dir(), (done.stdout + done.stderr)[-3000:]
    rounds = sorted(fp.captures.load(tmp_path / "run").rounds, key=lambda seen: (seen.index, seen.participants))
    assert [(seen.index, *seen.participants) for seen in rounds] == [
        (0, "site-1"),
        (0, "site-2"),
        (1, "site-1"),
        (1, "site-2"),
    ]
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for seen in rounds:
        (sent,), (update,) = seen.params.values(), seen.update.values()
        torch.testing.assert_close(sent.float(), start + 0.5 * seen.index)
        torch.testing.assert_close(update.float(), torch.full((2, 2), 0.5))


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
    with pytest.raises(fp.FedprismError, match="knowledge as a capture writes it"):
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
