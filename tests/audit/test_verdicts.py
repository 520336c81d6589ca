"""Audits of planted leaks and planted protections: the verdict, its words and the exit code of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedprism import cli, report
from fedprism.audit import Checks, Gate, load_audit, parse_gate, run_audit, trials
from fedprism.audit.summary import summarised, title
from fedprism.errors import BadInput
from fedprism.report.comparing import compare
from fedprism.runtime.executors import Serial
from small_audits import MATCHED, SMALL, START, planned, written

ONE = START + (
    '[grid]\nattacks = ["dense-inversion"]\nthreats = ["honest_but_curious"]\nbatch_sizes = [1]\nseeds = [0]\n'
    'defenses = ["DEFENSE"]\n[scores]\nmetrics = ["psnr", "mse"]\npictures = 0\n'
)
EXACT = ONE.replace("DEFENSE", "none")
PRUNED = ONE.replace('"DEFENSE"', '{name = "prune", ratio = 0.99}')
DROWNED = ONE.replace('"DEFENSE"', '{name = "gaussian-noise", std = 10.0}').replace(
    '"digits"', '"photos"\noptions = {size = 16}'
)
NOTHING_APPLIES = EXACT.replace("fc2", "lenet").replace("kwargs = { hidden = 32 }\n", "")


PSNR = parse_gate("psnr=100", ["psnr"])
STRICT = (
    parse_gate("psnr=15", ["psnr"]),
    parse_gate("mse=0.01", ["mse"], "below"),
    Gate(kind="ceiling-above", limit=16.0),
)


@pytest.mark.parametrize(
    ("plan", "gates", "verdict", "code"),
    [
        (EXACT, STRICT, "leaks", 1),
        (DROWNED, STRICT, "protected", 0),
        (PRUNED, (PSNR,), "inconclusive", 1),
        (NOTHING_APPLIES, (), "not tested", 2),
    ],
)
def test_one_verdict_for_results_summary_and_page(
    plan: str, gates: tuple[Gate, ...], verdict: str, code: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    audit = run_audit(planned(plan), out, executor=Serial(), checks=Checks(gates=gates))
    assert (audit.conclusion["verdict"], audit.conclusion["exit_code"]) == (verdict, code)
    assert f"# {verdict.upper()} (random weights): " in (out / "summary.md").read_text()
    page = report.render(audit)
    assert f'class="card verdict {verdict.replace(" ", "_")}"' in page
    green = 'class="card verdict protected"' in page
    assert green == (verdict == "protected"), "nothing else may look reassuring"


def test_the_command_ends_with_the_verdict_and_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", str(written(tmp_path, NOTHING_APPLIES)), "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main(command) == 2
    assert "NOT TESTED (random weights): no attack ran to completion." in capsys.readouterr().out
    assert cli.main([*command, "--resume", "--allow-untested"]) == 0


def test_a_ceiling_is_computed_once_per_setting_and_seed(tmp_path: Path) -> None:
    plan = DROWNED.replace('["dense-inversion"]', '["dense-inversion", "cocktail-party"]')
    audit = run_audit(planned(plan.replace("seeds = [0]", "seeds = [0, 1]")), tmp_path / "out", executor=Serial())
    kinds = [outcome.description["kind"] for outcome in audit]
    assert (kinds.count("attack"), kinds.count("ceiling")) == (4, 2)
    bounds = [outcome.record.ceiling for outcome in audit if outcome.record and outcome.record.ceiling]
    highest = max(value for bound in bounds for value in bound["values"])
    assert [row["ceiling"]["value"] for row in audit.summary] == [highest, highest]
    assert "natural images" in audit.summary[0]["ceiling"]["prior"]


def test_a_failed_ceiling_is_an_unknown_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise BadInput("expected a ceiling, found none; planted.")

    monkeypatch.setattr(trials, "ceiling", broken)
    audit = run_audit(planned(DROWNED), tmp_path / "out", executor=Serial())
    assert audit.conclusion["verdict"] == "inconclusive"
    assert audit.summary[0]["ceiling"] is None


def test_configurations_that_differ_in_any_setting_have_different_names(tmp_path: Path) -> None:
    grid = 'protocols = [{name = "fedavg", lr = [0.1, 0.2]}]\ndefenses = ["none", {name = "prune", ratio = [0.5, 0.9]}]'
    plan = MATCHED.replace("iterations = 3}", "iterations = [2, 3]}").replace("[scores]", f"{grid}\n[scores]")
    audit = run_audit(planned(plan), tmp_path / "out", executor=Serial())
    names = [title(row.cell) for row in summarised(audit)]
    assert len(set(names)) == len(names) == 12


def test_a_comparison_sees_changed_settings_and_changed_files(tmp_path: Path) -> None:
    before = run_audit(planned(SMALL), tmp_path / "before", executor=Serial())
    after = run_audit(planned(SMALL.replace("hidden = 32", "hidden = 16")), tmp_path / "after", executor=Serial())
    assert ("model.kwargs.hidden", "32", "16") in compare(before, after).settings
    document = json.loads((tmp_path / "before" / "results.json").read_text())
    name = next(iter(document["fingerprint"]))
    document["fingerprint"][name] = "other"
    (tmp_path / "after" / "results.json").write_text(json.dumps(document))
    changed = compare(before, load_audit(tmp_path / "after")).settings
    assert [key for key, _, _ in changed] == [f"content of {name}"]
