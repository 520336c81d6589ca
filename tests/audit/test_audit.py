"""The audit: what it says, its gates and its command."""

from __future__ import annotations

import io
import json
import platform
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import fedprism as fp
from fedprism import cli
from fedprism.audit import (
    estimate,
    execution,
    exports,
    load_audit,
    materials,
    parse_gate,
    parse_plan,
    prepare,
    run_audit,
)
from fedprism.audit.gates import Checks, Conclusion, Gate
from fedprism.audit.grid import lay_out
from fedprism.audit.summary import Summary, summarised, title
from fedprism.audit.trials import trial_of
from fedprism.cli import auditing
from fedprism.errors import BadInput
from fedprism.evaluation.verdict import CeilingFigure
from fedprism.experiments import Outcome, Trial, run_trial
from fedprism.runtime import devices
from fedprism.runtime.executors import Processes, RayCluster
from small_audits import MATCHED, SMALL, START, planned, sentence, written

# --- what an audit says ----------------------------------------------------------------------------------------------


def test_an_audit_finds_what_leaks_and_what_a_defense_changes(tmp_path: Path) -> None:
    audit = run_audit(planned(SMALL), tmp_path / "out")
    assert len(audit) == 8
    found = {(f.description["defense"], f.description["batch_size"], f.description["seed"]): f for f in audit}
    bare, pruned = found["none", 1, 0], found["prune(ratio=0.9)", 1, 0]
    assert bare.record is not None
    assert bare.record.scores is not None
    assert pruned.record is not None
    assert pruned.record.scores is not None
    assert bare.record.scores["means"]["psnr"] > 60  # one digit through a dense layer comes back exactly
    assert pruned.record.scores["means"]["psnr"] < 40
    assert bare.record.residual is not None
    assert bare.record.residual < 1e-4
    assert set(bare.record.knowledge_used) <= fp.threats.honest_but_curious.grants
    nulls = bare.baselines
    assert set(nulls) == {"blank", "mean", "noise", "other"}
    assert max(value["psnr"] or 0 for value in nulls.values()) < 20
    samples = audit.samples(bare.key)
    assert samples is not None
    assert torch.equal(samples["originals"], samples["recovered"])
    row = audit.summary[0]
    assert row["metrics"]["psnr"]["baseline"] == pytest.approx(
        max(np.mean([found["none", 1, s].baselines[n]["psnr"] for s in (0, 1)]) for n in nulls)
    )


def test_the_interval_over_seeds_is_student_s(tmp_path: Path) -> None:
    from scipy.stats import t

    audit = run_audit(planned(SMALL.replace("seeds = [0, 1]", "seeds = [0, 1, 2, 3, 4]")), tmp_path / "out")
    row = next(
        r for r in audit.summary if r["configuration"]["defense"] != "none" and r["configuration"]["batch_size"] == 2
    )
    values = [
        f.record.scores["means"]["psnr"]
        for f in audit
        if {**f.description, "seed": 0} == {**row["configuration"], "seed": 0}
    ]  # type: ignore[union-attr, index]
    low, high = t.interval(0.95, len(values) - 1, np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5)
    assert (row["metrics"]["psnr"]["low"], row["metrics"]["psnr"]["high"]) == pytest.approx((low, high))


def test_results_hold_no_path_and_no_clock(tmp_path: Path) -> None:
    inputs, labels = np.random.default_rng(0).random((20, 6), dtype=np.float32), np.arange(20) % 2
    np.savez(tmp_path / "mine.npz", inputs=inputs, labels=labels)
    text = SMALL.replace('name = "digits"', f'npz = "{tmp_path / "mine.npz"}"')
    audit = run_audit(planned(text), tmp_path / "out")
    content = (tmp_path / "out" / "results.json").read_text()
    assert str(tmp_path) not in content
    assert platform.node() not in content
    assert json.loads((tmp_path / "out" / "run.json").read_text())["host"]
    assert next(iter(audit)).seconds > 0


def test_a_user_s_own_model_and_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "h7_own_code.py").write_text(
        "from torch import nn\ndef network():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    plan = SMALL.replace(
        'name = "fc2"\nkwargs = { hidden = 32 }', 'factory = "h7_own_code:network"\nweights = "w.safetensors"'
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    setup = prepare(written(tmp_path, plan))
    found = setup.materials().network(3).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    finished = run_trial(trial_of(setup, lay_out(setup).cells[0]))
    assert finished.state == "done"
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match="state_dict"):
        setup.materials().network(0)


def test_sums_of_several_clients_are_taken_apart(tmp_path: Path) -> None:
    text = START + (
        "[federation]\nrounds = 12\nparticipation = 0.5\nfrozen = true\nwindow = 4\n"
        '[grid]\nclients = [4]\nbatch_sizes = [1]\nseeds = [0]\nthreats = ["secure_aggregation"]\n'
        'attacks = ["disaggregation", {name = "disaggregation", then = "dense-inversion"}]\n'
    )
    updates, images, _ = run_audit(planned(text), tmp_path / "out")
    assert updates.record is not None
    assert updates.record.scores is not None
    assert updates.record.scores["means"]["update-error"] < 1e-5
    assert images.record is not None
    assert images.record.scores is not None
    assert images.record.scores["means"]["psnr"] > 60


@pytest.mark.parametrize("counts", ["", 'window = 10\ncounts = {name = "laplace", epsilon = 1}\n'])
def test_sums_are_taken_apart_without_counts_and_with_noisy_ones(tmp_path: Path, counts: str) -> None:
    text = START + (
        f"[federation]\nrounds = 60\nparticipation = 0.3\nfrozen = true\n{counts}"
        '[grid]\nclients = [4]\nbatch_sizes = [1]\nseeds = [0]\nthreats = ["secure_aggregation"]\n'
        'attacks = ["disaggregation", {name = "disaggregation", then = "dense-inversion"}]\n'
    )
    updates, images, _ = run_audit(planned(text), tmp_path / "out")
    assert updates.record is not None
    assert updates.record.scores is not None
    assert updates.record.scores["means"]["update-error"] < 1e-4
    assert images.record is not None
    assert images.record.scores is not None
    assert images.record.scores["means"]["psnr"] > 60


def test_utility_is_measured_and_its_clock_kept_apart(tmp_path: Path) -> None:
    text = SMALL + "[utility]\nepochs = 3\nbatch_size = 200\nlr = 0.2\nseeds = [0]\ntimed_steps = 1\n"
    text = text.replace('{name = "prune", ratio = 0.9}', '{name = "dp-sgd", noise = 1.0}').replace(
        "seeds = [0, 1]", "seeds = [0]"
    )
    audit = run_audit(planned(text.replace("[1, 2]", "[1]")), tmp_path / "out")
    bare, private = [f for f in audit if f.description["kind"] == "utility"]
    assert bare.record is not None
    assert private.record is not None
    assert bare.record.accuracy is not None
    assert private.record.accuracy is not None
    assert bare.record.accuracy > private.record.accuracy
    assert private.record.epsilon == pytest.approx(fp.defenses.DpSgd(1.0).epsilon(steps=3))
    assert private.record.time_factor is None
    assert private.time_factor is not None
    assert '"time_factor": null' in (tmp_path / "out" / "results.json").read_text()
    assert "| defense | verdict | recovered | ceiling | accuracy" in (tmp_path / "out" / "summary.md").read_text()


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("psnr", "above", "METRIC=VALUE"),
        ("psnr=x", "above", "METRIC=VALUE"),
        ("psnr=nan", "above", "METRIC=VALUE"),
        ("mse=0.1", "above", "lower values mean a larger leak. Write --fail-below mse=0.1"),
        ("psnr=20", "below", "higher values mean a larger leak. Write --fail-above psnr=20"),
        ("psmr=3", "above", "did you mean psnr"),
        ("ssim=0.5", "above", "psnr"),
        ("max-mse=0.5", "below", "mse"),
    ],
)
def test_a_gate_that_means_nothing_is_refused(text: str, kind: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_gate(text, ["psnr", "mse"], kind)


def concluded(rows: list[Summary], *gates: Gate, **allowed: bool) -> Conclusion:
    return Checks(gates=gates, **allowed).concluded(rows, "random weights")


def planted_row(psnr: float | None, **cell: Any) -> Summary:
    """One configuration; without a PSNR its cell failed."""
    setting = {"kind": "attack", "attack": "idlg", "threat": "eavesdropper", "defense": "none", "clients": 1}
    row = Summary(cell={**setting, "batch_size": 1, "protocol": "FedSGD()", "loss": "mse", **cell})
    if psnr is None:
        row.outcomes = {"failed": 1}
        return row
    row.outcomes, row.means, row.closest = {"done": 1}, {"psnr": [psnr], "mse": [10 ** (-psnr / 10)]}, {"psnr": psnr}
    row.closest["mse"] = row.means["mse"][0]
    row.baselines, row.samples, row.answered = {"psnr": {"mean": [13.0]}}, 1, 1
    return row


def bounded(value: float, psnr: float = 12.0, **changes: Any) -> Summary:
    row = planted_row(psnr, **changes)
    row.ceiling = CeilingFigure(metric="psnr", value=value, confidence=0.95, prior="p")
    return row


ABOVE, BELOW = parse_gate("psnr=15", ["psnr"]), parse_gate("mse=0.01", ["mse"], "below")
CEILING = Gate(kind="ceiling-above", limit=20.0)


@pytest.mark.parametrize(
    ("rows", "gates", "allowed", "code"),
    [
        ([planted_row(40.0)], [], {}, 0),
        ([planted_row(40.0)], [ABOVE], {}, 1),
        ([planted_row(40.0)], [BELOW], {}, 1),
        ([planted_row(40.0)], [ABOVE], {"allow_inconclusive": True}, 1),
        ([planted_row(12.0)], [], {}, 0),
        ([planted_row(12.0)], [ABOVE], {}, 1),
        ([planted_row(12.0)], [BELOW], {}, 1),
        ([planted_row(12.0)], [ABOVE], {"allow_inconclusive": True}, 0),
        ([planted_row(40.0)], [parse_gate("psnr=50", ["psnr"])], {}, 1),
        ([planted_row(40.0)], [parse_gate("psnr=50", ["psnr"])], {"allow_inconclusive": True}, 0),
        ([bounded(45.0, psnr=40.0)], [parse_gate("psnr=50", ["psnr"])], {}, 0),
        ([bounded(55.0, psnr=40.0)], [parse_gate("psnr=50", ["psnr"])], {}, 1),
        ([bounded(14.0)], [ABOVE, BELOW, CEILING], {}, 0),
        ([bounded(19.0)], [CEILING], {}, 0),
        ([bounded(19.0)], [CEILING, ABOVE], {}, 1),
        ([bounded(21.0)], [CEILING], {"allow_inconclusive": True}, 1),
        ([bounded(14.0), planted_row(12.0, clients=2)], [CEILING], {}, 1),
        ([planted_row(12.0)], [CEILING], {"allow_inconclusive": True}, 1),
        ([bounded(14.0), planted_row(None, attack="dlg")], [ABOVE], {}, 1),
        ([planted_row(None)], [], {}, 2),
        ([planted_row(None)], [ABOVE], {}, 2),
        ([planted_row(None)], [ABOVE], {"allow_untested": True}, 0),
        ([], [], {}, 2),
        ([], [], {"allow_untested": True}, 0),
    ],
)
def test_exit_codes_follow_the_verdict(rows: Any, gates: Any, allowed: dict[str, bool], code: int) -> None:
    assert concluded(rows, *gates, **allowed).exit_code == code


def test_an_unknown_ceiling_is_said_to_be_unknown() -> None:
    (gate,) = concluded([bounded(float("inf"))], CEILING).gates
    assert not gate.passed
    assert gate.reasons[0].endswith("no ceiling is known; 1 are unknown or beyond the limit.")
    (gate,) = concluded([bounded(25.0)], CEILING).gates
    assert "25 is beyond the limit of 20; 1 in all." in gate.reasons[0]


def test_a_gate_looks_at_means_or_at_the_best_recovered_sample() -> None:
    row = bounded(14.0)
    row.closest["psnr"] = 16.0
    assert concluded([row], ABOVE).exit_code == 0
    (single,) = concluded([row], parse_gate("max-psnr=15", ["psnr"])).gates
    assert (single.passed, single.value, single.beyond) == (False, 16.0, 1)
    row.means["psnr"] = [float("nan")]
    assert not concluded([row], parse_gate("psnr=1000", ["psnr"])).gates[0].passed, "no number passes nothing"


def test_what_came_of_gates_stands_in_every_file(tmp_path: Path) -> None:
    gates = tuple(parse_gate(text, ["psnr", "ssim"]) for text in ("psnr=15", "max-ssim=2"))
    plan = planned(SMALL.replace('["psnr"]', '["psnr", "ssim"]'))
    audit = run_audit(plan, tmp_path / "out", checks=Checks(gates=gates, allow_inconclusive=True))
    rows = summarised(audit)
    means = {title(row.cell): figure.mean for row in rows if (figure := row.figure("psnr")) is not None}
    assert audit.conclusion["verdict"] == "leaks"
    failed, passed = audit.conclusion["checks"]
    assert (failed["flag"], failed["limit"], failed["single"], failed["passed"]) == (
        "--fail-above psnr=15",
        15.0,
        False,
        False,
    )
    assert failed["value"] == max(means.values())
    assert failed["worst"] == max(means, key=means.__getitem__)
    assert failed["beyond"] == sum(mean > 15 for mean in means.values())
    assert (passed["check"], passed["passed"], passed["beyond"]) == ("max-ssim=2", True, 0)
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert summary.startswith("# LEAKS (random weights): an attack recovered private samples.\n")
    assert re.search(r"\| --fail-above psnr=15 \| failed \| (inf|[\d.]+) \| dense-inversion, ", summary)
    assert "| --fail-above max-ssim=2 | passed |" in summary
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert int(suite.attrib["failures"]) >= 2
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + len(rows)


def test_dry_run_shows_the_grid_and_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "PATIENCE", 600.0)  # a busy machine must not change what is said
    out = tmp_path / "out"
    assert cli.main(["audit", str(written(tmp_path)), "-o", str(out), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "2 x  dense-inversion, honest_but_curious, no defense, 1 client of 1" in printed
    assert re.search(r"8 runs, (about|at least) \d+ (s|min)", printed)
    assert "MB of memory" in printed
    assert not out.exists()


def test_what_happens_once_a_cell_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of 3 seconds and 10 ms an iteration or epoch, the first one of 40 seconds more: these are left out."""
    ran: list[int] = []

    def timed(trial: Any, *, device: str) -> SimpleNamespace:
        ran.append(trial.attack.iterations if isinstance(trial, Trial) else trial.setup.plan.utility.epochs)
        return SimpleNamespace(seconds=3 + 0.01 * ran[-1] + 40 * (len(ran) == 1), state="done")

    monkeypatch.setattr(estimate, "run_trial", timed)
    setup = planned(
        MATCHED.replace("iterations = 3", "iterations = 1000") + "\n[utility]\nepochs = 50\nseeds = [0, 1]\n"
    )
    cells = lay_out(setup).cells
    assert {cell.kind for cell in cells} == {"attack", "utility"}
    for cell in cells:
        ran.clear()
        whole = 3 + 0.01 * 1000 if cell.kind == "attack" else 2 * (3 + 0.01 * 50)
        assert estimate._seconds(setup, "cpu", cell) == (pytest.approx(whole), "")
        assert max(ran) <= estimate.MOST


def test_nothing_is_fetched_unless_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDPRISM_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    text = SMALL.replace('["psnr"]', '["psnr", "lpips-alex"]')
    plan, out = written(tmp_path, text), tmp_path / "out"
    assert cli.main(["audit", str(plan), "-o", str(out)]) == 2
    refusal = sentence(capsys)
    assert "alexnet" in refusal
    assert refusal.endswith("allow the download with --allow-download.")
    assert not out.exists()
    asked: list[bool] = []

    def lpips(found: torch.Tensor, source: torch.Tensor, allow_download: bool) -> torch.Tensor:
        asked.append(allow_download)
        return torch.full((len(source),), 0.5)

    line = fp.metrics.METRICS["lpips-alex"]._replace(function=lpips)
    monkeypatch.setitem(fp.metrics.METRICS, "lpips-alex", line)
    setup = prepare(plan, allow_download=True)
    setup.require_metrics()
    finished = run_trial(trial_of(setup, lay_out(setup).cells[0]))
    assert finished.record is not None
    assert finished.record.scores is not None
    assert finished.record.scores["means"]["lpips-alex"] == 0.5
    assert asked
    assert all(asked)
    tables = parse_plan(text.replace('"digits"', '"patients"'))
    prepare(tables).require_metrics()  # LPIPS is for images, so that rows need no network


def test_the_table_loses_nothing_on_a_narrow_terminal(tmp_path: Path) -> None:
    text = SMALL.replace(
        "ratio = 0.9}", 'ratio = [0.9, 0.99]}, [{name = "clip", norm = 1.0}, {name = "prune", ratio = 0.5}]'
    )
    rows = summarised(run_audit(planned(text), tmp_path / "out"))
    for width in (60, 80, 200):
        screen = io.StringIO()
        Console(file=screen, width=width, markup=False).print(exports.table(rows, ["psnr"]))
        lines = screen.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        head = next(line for line in lines if "configuration" in line)
        assert {"psnr", "returned", "labels", "outcome"} <= set(head.split())
        assert sum("done" in line for line in lines) == len(rows) == 8
        assert "prune(ratio=0.5)" in "".join(line[: head.index("psnr") - 8].strip() for line in lines)


def test_a_limit_that_would_not_be_kept_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path, SMALL + "[limits]\nseconds = 5\n")
    assert cli.main(["audit", str(plan), "-o", str(tmp_path / "out"), "--ray", "local"]) == 2
    assert "limits.seconds" in sentence(capsys)


def test_workers_and_ray_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(written(tmp_path)), "--workers", "2", "--ray", "local"]) == 2
    assert "Leave one out" in sentence(capsys)


def test_a_terminal_is_shown_how_far_it_is() -> None:
    screen = io.StringIO()
    with auditing._bar(Console(file=screen, force_terminal=True, width=100)) as listen:
        listen(execution.AuditProgress(done=6, total=10, earlier=6))
        listen(
            execution.AuditProgress(done=8, total=10, earlier=6, outcome=Outcome(key="", description={}, state="done"))
        )
    assert "2/4" in screen.getvalue(), "cells of an earlier run do not count"
    assert "left:" in screen.getvalue()


@pytest.mark.parametrize(("free", "needed", "workers"), [(80, 1, 8), (80, 20, 3), (80, 100, 1), (0, 1, 1), (2, 0, 2)])
def test_no_more_workers_than_a_gpu_holds(free: int, needed: int, workers: int) -> None:
    assert estimate.fitting(8, free * 2**30, needed * 2**30) == workers


def test_cells_of_a_cluster_ask_for_what_they_need_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = planned(SMALL)
    grid = lay_out(setup)
    monkeypatch.setattr(estimate, "workers_that_fit", lambda setup, grid, workers, device: min(workers, 4))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert auditing._executor(setup, grid, None, "local", cpu) == RayCluster()
    assert auditing._executor(setup, grid, None, "local", gpu) == RayCluster(gpus=0.25)
    assert auditing._executor(setup, grid, None, "ray://head:10001", gpu) == RayCluster(
        address="ray://head:10001", gpus=1.0
    )
    assert auditing._executor(setup, grid, 16, None, gpu) == Processes(workers=4)
    assert auditing._place("cuda", elsewhere=True).type == "cuda", "this machine need not have one"
    assert auditing._place(None, elsewhere=True) == devices.pick(None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_memory_of_a_gpu_is_measured() -> None:
    setup = planned(MATCHED)
    (probe,) = estimate._probes(setup, "cuda", lay_out(setup).cells)
    assert probe is not None
    assert probe.gpu_memory > 0


def test_a_negative_share_of_a_gpu_is_refused() -> None:
    with pytest.raises(BadInput, match="gpus"):
        RayCluster(gpus=-1.0)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": "fedprism-audit/1"}', b'{"records": [{"id": "../../x"}]}', b"\xff" * 9]
)
def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"results\.json"):
        load_audit(tmp_path)


def test_the_data_are_not_loaded_again_while_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = planned(SMALL.replace('attacks = ["dense-inversion"]', "") + "\n[utility]\nepochs = 3\nseeds = [0]\n")
    (cell,) = (cell for cell in lay_out(setup).cells if cell.kind == "utility" and not cell.defense)
    monkeypatch.setattr(materials, "_loaded", lambda *_: pytest.fail("loaded again"))
    seconds, refused = estimate._seconds(setup, "cpu", cell)
    assert seconds > 0
    assert not refused
