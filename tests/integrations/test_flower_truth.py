"""The truth of a federation of one's own, kept by its clients: an audit of the recording is scored with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')

from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from fedprism.audit import prepare, run_audit
from fedprism.errors import BadInput
from fedprism.integrations import flower
from fedprism.runtime.executors import Serial
from flower_runs import (
    RATE,
    Frozen,
    LocalGrid,
    averaging,
    batch_of,
    client_number,
    message_app,
    recorded,
    run_secure,
    server_context,
    small_model,
    start,
    trained,
)
from report_pages import Page
from small_audits import written

KNOWN = fp.Knowledge(input_shape=(1, 8, 8), loss="cross_entropy", local_lr=RATE, local_epochs=1, local_momentum=0.0)
PLAN = """
[captures]
folders = ["run"]
truths = ["truth/run-1"]
knowledge = { local_optimizer = "sgd", local_batch_size = 2 }
[grid]
attacks = [ATTACK]
seeds = [0]
"""


def keeping_fit_app(kept: flower.TruthMod) -> ClientApp:
    """Clients with fit() inside secure aggregation that hand the mod what they train on."""

    class Client(NumPyClient):
        def __init__(self, client: int) -> None:
            self.client = client

        def fit(self, parameters, config):  # type: ignore[no-untyped-def]
            batch, model = batch_of(self.client), small_model()
            kept.keep(batch.inputs, batch.labels)
            return [tensor.numpy() for tensor in trained(model, batch).values()], len(batch), {}

    return ClientApp(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client(),
        mods=[secaggplus_mod, kept],
    )


def scores(tmp_path: Path, attack: str) -> dict[str, list[float]]:
    audit = run_audit(prepare(written(tmp_path, PLAN.replace("ATTACK", attack))), tmp_path / "out", executor=Serial())
    (outcome,) = list(audit)
    assert outcome.record is not None, outcome.reason
    assert outcome.record.scores is not None
    return dict(outcome.record.scores["values"])


def assert_nothing_of_the_truth_in(capture: Path) -> None:
    content = b"".join(path.read_bytes() for path in capture.iterdir())
    for client in range(3):
        for image in batch_of(client).inputs:
            assert image.numpy().tobytes() not in content


def test_an_audit_of_a_recorded_run_is_scored(tmp_path: Path) -> None:
    kept = flower.TruthMod(tmp_path / "truth")
    strategy = recorded(averaging(3), tmp_path / "run", model=small_model(), knowledge=KNOWN)
    start(strategy, LocalGrid(message_app([kept], kept=kept), 3), rounds=2)
    observation = fp.captures.load(tmp_path / "run")
    truth = fp.load_truth(tmp_path / "truth" / "run-1", observation)
    clients = [client_number(seen.participants[0]) for seen in observation.rounds]
    assert torch.equal(truth.inputs, torch.cat([batch_of(client).inputs for client in clients]))
    assert_nothing_of_the_truth_in(tmp_path / "run")
    found = scores(tmp_path, '"dense-inversion"')["psnr"]
    assert len(found) == len(truth.owners) == 2 * (1 + 2 + 1)
    assert min(found) > 60
    page = fp.report.write(tmp_path / "out").read_text()
    assert "private samples were recovered (dense-inversion" in Page(page).text


def test_clients_behind_secure_aggregation_keep_theirs(tmp_path: Path) -> None:
    kept = flower.TruthMod(tmp_path / "truth")
    strategy = Frozen([[0, 1], [1, 2], [0, 2]])
    grid = recorded(LocalGrid(keeping_fit_app(kept), 3), tmp_path / "run", model=small_model(), knowledge=KNOWN)
    run_secure(grid, strategy, server_context(), 3, num_shares=1.0, reconstruction_threshold=1.0)
    truth = fp.load_truth(tmp_path / "truth" / "run-1", fp.captures.load(tmp_path / "run"))
    assert sorted(map(client_number, truth.owners)) == [0, 1, 1, 2], "each sample once, though it is in two sums"
    assert_nothing_of_the_truth_in(tmp_path / "run")
    attack = '{ name = "disaggregation", then = "dense-inversion" }'
    assert sum(value is not None and value > 30 for value in scores(tmp_path, attack)["psnr"]) >= 2


def test_a_mod_that_is_not_listed_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"Write @app.train\(mods="):
        flower.TruthMod(tmp_path).keep(torch.zeros(1, 2), torch.zeros(1))


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "truth").write_text("a file is in the way")
    strategy = recorded(averaging(3), tmp_path / "run", model=small_model(), knowledge=KNOWN)
    kept = flower.TruthMod(tmp_path / "truth")
    start(strategy, LocalGrid(message_app([kept], kept=kept), 3))
    assert len(fp.captures.load(tmp_path / "run").rounds) == 3
    assert "the ground truth of round 1 is not kept" in caplog.text
