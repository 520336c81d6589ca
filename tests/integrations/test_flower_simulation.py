"""The recorder on Flower's own simulation engine: processes, serialised messages, node ids of the engine's choosing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')
pytest.importorskip("ray", reason='the simulation engine needs ray: pip install "fedprism[flower]"')

from fedprism.integrations.facts import read_facts
from fedprism.integrations.findings import load_findings
from flower_runs import batch_of, small_model, trained

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "flower_simulated.py"), str(folder)],
        env={**os.environ, **quiet, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def expected_updates() -> list[torch.Tensor]:
    """What the three clients send in a first round, as vectors, computed without Flower."""
    before = torch.cat([tensor.flatten() for tensor in small_model().state_dict().values()])
    after = [torch.cat([t.flatten() for t in trained(small_model(), batch_of(c)).values()]) for c in range(3)]
    return [vector - before for vector in after]


def vector(update: fp.types.Update) -> torch.Tensor:
    return torch.cat([update[name].flatten() for name in small_model().state_dict()])


def assert_all_there(found: list[torch.Tensor], tolerance: float) -> None:
    """Each of the clients' updates is among those found, each once: engines name their nodes as they like."""
    distances = torch.cdist(torch.stack(expected_updates()), torch.stack(found), p=torch.inf)
    assert sorted(distances.argmin(1).tolist()) == [0, 1, 2]
    assert float(distances.min(1).values.max()) < tolerance


def test_federated_averaging_is_recorded(captures: Path) -> None:
    rounds = fp.captures.load(captures / "plain").rounds
    assert [seen.index for seen in rounds] == [1, 1, 1, 2, 2, 2]
    assert len({seen.participants for seen in rounds}) == 3
    assert_all_there([vector(seen.update) for seen in rounds[:3]], 1e-6)
    assert load_findings(captures / "plain") == ()


def test_clients_in_processes_of_their_own_keep_the_truth(captures: Path) -> None:
    (run,) = (captures / "truth").iterdir()
    second_round = fp.captures.load(captures / "plain", updates=[3, 4, 5])  # the private run has a first round, too
    truth = fp.load_truth(run, second_round)
    expected = torch.cat([batch_of(client).inputs for client in range(3)]).flatten(1)
    assert len(truth.owners) == len(expected)
    assert float(torch.cdist(expected, truth.tensor.flatten(1)).min(1).values.max()) == 0.0


def test_central_differential_privacy_shows_raw_updates(captures: Path) -> None:
    assert_all_there([vector(seen.update) for seen in fp.captures.load(captures / "private").rounds], 1e-6)
    found = {finding.check: finding for finding in load_findings(captures / "private")}
    assert set(found) == {"raw-updates-seen", "noise-below-configured"}
    # Examples 1, 2, 1: half of the mean is one client's.
    assert found["noise-below-configured"].evidence["effective_multiplier"] == pytest.approx(0.5 / 10 * 2)


def test_secure_aggregation_is_recorded_and_taken_apart(captures: Path) -> None:
    observation = fp.captures.load(captures / "secure")
    assert [len(seen.participants) for seen in observation.rounds] == [2, 2, 2]
    assert {fact.protocol for fact in read_facts(captures / "secure")} == {"secagg+"}
    checks = {finding.check for finding in load_findings(captures / "secure")}
    assert checks >= {"participants-in-clear", "examples-in-clear", "metrics-in-clear", "sums-come-apart"}
    split = fp.run(fp.attacks.disaggregation(), observation)
    assert_all_there([vector(update) for update in split.updates], 1e-4)
    attack = fp.then(fp.attacks.disaggregation(), fp.attacks.dense_inversion())
    images = fp.run(attack, observation).inputs.flatten(1)
    alone = torch.stack([batch_of(client).inputs.flatten() for client in (0, 2)])
    assert float(torch.cdist(alone, images).min(1).values.max()) < 0.1
