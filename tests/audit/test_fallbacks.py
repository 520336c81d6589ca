"""An automatic choice of attacks that all refuse is followed by the attack that they recommend."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprism.audit import grid as grids
from fedprism.audit import load_audit, run_audit
from fedprism.audit.entries import AttackEntry
from fedprism.runtime.executors import Serial
from small_audits import planned

PLAN = """
[model]
name = "lenet"
kwargs = { width = 2 }
[data]
name = "digits"
[grid]
batch_sizes = [1]
seeds = [0]
threats = ["honest_but_curious"]
[scores]
metrics = ["psnr"]
ceiling = false
"""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution comes first: dense-inversion refuses, and recommends gradient matching."""
    monkeypatch.setattr(grids, "default_attacks", lambda *_: [AttackEntry(name="dense-inversion")])
    monkeypatch.setattr("fedprism.audit.fallbacks.STANDS_FOR", {"gradient-matching": "dlg"})


@pytest.mark.usefixtures("refused")
def test_what_refusals_recommend_is_tried_and_kept(tmp_path: Path) -> None:
    setup = planned(PLAN)
    told: list[tuple[int, int]] = []
    audit = run_audit(setup, tmp_path / "out", executor=Serial(), listen=lambda now: told.append((now.done, now.total)))
    states = {row.description["attack"]: row.state for row in audit}
    assert states == {"dense-inversion": "skipped", "dlg": "done"}
    assert audit.conclusion["verdict"] != "not tested"
    assert told[-1] == (2, 2)
    again = run_audit(setup, tmp_path / "out", executor=Serial(), resume=True)
    assert list(again) == list(load_audit(tmp_path / "out"))


def test_a_plan_that_names_its_attacks_gets_no_others(tmp_path: Path) -> None:
    setup = planned(PLAN.replace("seeds", 'attacks = ["dense-inversion"]\nseeds'))
    audit = run_audit(setup, tmp_path / "out", executor=Serial())
    assert [row.state for row in audit] == ["skipped"]
    assert audit.conclusion["verdict"] == "not tested"
