"""One audit cell makes each thing once: attack, threat model, network, plan, and the pairing with originals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedprism as fp
from fedprism import attacks
from fedprism.audit import load_plan, prepare, run_audit
from fedprism.audit.entries import ThreatEntry
from fedprism.audit.materials import Materials
from fedprism.audit.plan import Plan
from fedprism.experiments import trial

PLAN = """
[model]
name = "fc2"
kwargs = { hidden = 8 }
[data]
name = "digits"
options = { size = 8 }
[grid]
attacks = ["dense-inversion"]
threats = ["honest_but_curious"]
batch_sizes = [1]
seeds = [0]
"""


def test_one_cell_makes_each_thing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counting(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return counting

    paired: list[fp.Reconstruction] = []

    def pairing(answer: fp.Reconstruction, truth: fp.Truth) -> Any:
        paired.append(answer)
        return fp.match(answer, truth)

    monkeypatch.setitem(attacks.ATTACKS, "dense-inversion", counted("attack", attacks.dense_inversion))
    monkeypatch.setattr(Materials, "new_network", counted("network", Materials.new_network))
    threat = vars(ThreatEntry)["method"]
    monkeypatch.setattr(threat, "func", counted("threat", threat.func))
    monkeypatch.setattr(Plan, "model_validate", counted("plan", Plan.model_validate))
    monkeypatch.setattr(Plan, "model_validate_json", counted("plan", Plan.model_validate_json))
    monkeypatch.setattr(trial, "match", pairing)
    (tmp_path / "plan.toml").write_text(PLAN)
    outcome, bound = run_audit(prepare(load_plan(tmp_path / "plan.toml")), tmp_path / "out")
    assert (outcome.description["kind"], bound.description["kind"]) == ("attack", "ceiling")
    assert outcome.state == bound.state == "done"
    assert counts == {"attack": 1, "network": 1, "threat": 1, "plan": 1}
    assert len(paired) == len(set(map(id, paired))) == 1 + len(outcome.baselines), (
        "the answer once, each null baseline once"
    )
