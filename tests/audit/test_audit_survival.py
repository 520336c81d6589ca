"""Whatever happens to the process, the disk or the memory, an audit loses nothing and gives the same results."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedprism as fp
from fedprism import cli, report
from fedprism.audit import execution, load_audit, parse_gate, prepare, run_audit
from fedprism.audit.gates import Checks
from fedprism.audit.grid import lay_out
from fedprism.audit.summary import summarised
from fedprism.audit.trials import trial_of
from fedprism.client import update
from fedprism.errors import BadInput
from fedprism.experiments import Outcome, ResultStore, run_trial, run_trials
from fedprism.experiments import execution as trials_execution
from fedprism.experiments.execution import Runnable, without_result
from fedprism.files.json_text import as_json
from fedprism.files.lock import locked
from fedprism.runtime.executors import Failure, Processes, Serial
from small_audits import MATCHED, SMALL, planned, sentence, written

CHECKS = Checks(gates=(parse_gate("psnr=15", ["psnr"]),))
KILLED = """
import sys, time
from fedprism.audit import prepare, run_audit
setup = prepare(sys.argv[1])
print("ready", flush=True)
run_audit(setup, sys.argv[2], resume=True, listen=lambda progress: time.sleep(0.05))
"""


def test_killed_again_and_again_it_ends_with_the_same_results(tmp_path: Path) -> None:
    text = SMALL.replace("seeds = [0, 1]", "seeds = [0, 1, 2, 3, 4]")
    plan, out = written(tmp_path, text), tmp_path / "killed"
    run_audit(prepare(plan), tmp_path / "whole")
    seen = 0
    for kill in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(plan), str(out)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while len(list(out.glob("records/*.json"))) < seen + 2 + kill and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        before = seen
        seen = len(list(out.glob("records/*.json")))
        assert seen > before, "what was finished is kept"
        assert not (out / "results.json").exists()
    (out / "records" / ".0123456789abcdef.json.tmp").write_text("half a rec")
    broken = sorted(out.glob("records/*.json"))[0]
    broken.write_text(broken.read_text()[:100])  # as a power cut may leave it
    run_audit(prepare(plan), out, resume=True)
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    pages = [report.write(folder).read_bytes() for folder in (out, tmp_path / "whole")]
    assert pages[0] == pages[1]
    assert {p.name for p in out.glob("records/*")} == {p.name for p in (tmp_path / "whole").glob("records/*")}
    assert list(out.glob("records/.*")) == []


def test_any_number_of_workers_gives_the_same_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path)
    run_audit(prepare(plan), tmp_path / "alone", executor=Serial(), checks=CHECKS)
    assert cli.main(["audit", str(plan), "-o", str(tmp_path / "two"), "--workers", "2", "--fail-above", "psnr=15"]) == 1
    assert (tmp_path / "alone" / "results.json").read_bytes() == (tmp_path / "two" / "results.json").read_bytes()
    printed = capsys.readouterr()
    assert "is beyond the limit of 15" in printed.out
    assert "8 of 8 runs" in printed.err


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    store = ResultStore(tmp_path / "store")
    store.prepare()
    return store


def crash(trial: Runnable, **options: Any) -> Outcome:
    """Whatever can go wrong in a cell, by its seed."""
    seed = trial.description["seed"]
    if seed == 1:
        raise RuntimeError("planned\nfailure")
    if seed == 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return run_trial(trial, **options)


def test_a_failing_cell_is_a_failed_record_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = planned(SMALL.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    with monkeypatch.context() as patched:
        patched.setattr(trials_execution, "run_trial", crash)
        audit = run_audit(setup, tmp_path / "out")
    outcomes = {f.description["seed"]: f for f in audit}
    assert outcomes[0].state == "done"
    assert outcomes[1].state == "failed"
    assert outcomes[1].reason == "the task raised RuntimeError: planned failure"
    rows = summarised(audit)
    assert rows[0].outcomes == {"done": 1, "failed": 2}
    (gate,) = Checks(gates=(parse_gate("psnr=1000", ["psnr"]),)).concluded(rows, "").gates
    assert "failed" in " ".join(gate.reasons)
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert suite.attrib["errors"] == str(len(rows))
    again = run_audit(setup, tmp_path / "out", resume=True)
    assert {f.state for f in again} == {"done"}


def test_a_method_that_does_not_apply_is_skipped_with_its_reason() -> None:
    setup = planned(SMALL.replace('name = "fc2"\nkwargs = { hidden = 32 }', 'name = "lenet"'))
    finished = run_trial(trial_of(setup, lay_out(setup).cells[0]))
    assert finished.state == "skipped"
    assert "dense layer" in finished.reason


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_cell_without_enough_memory_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: Any, **__: Any) -> Any:
        raise error

    setup = planned(SMALL)
    monkeypatch.setattr("fedprism.runner.run", greedy)
    finished = run_trial(trial_of(setup, lay_out(setup).cells[0]))
    assert finished.state == "failed"
    assert finished.reason.startswith("out of memory: ")


def test_what_ran_out_of_memory_beside_others_is_tried_alone(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = planned(SMALL)
    cells = lay_out(setup).cells

    def run(self: Processes, function: Callable[[Runnable], Any], tasks: Any) -> Any:
        for index, trial in enumerate(tasks):
            short = self.workers != 1 and index % 2
            yield (
                index,
                without_result(trial, "out of memory: too much")
                if short
                else Outcome(key=trial.key, description=trial.description, state="done"),
            )

    monkeypatch.setattr(Processes, "run", run)
    found = list(run_trials([trial_of(setup, cell) for cell in cells], store, Processes(workers=4)))
    assert {f.key for f in found} == {c.key for c in cells}
    assert {f.state for f in found} == {"done"}


def short_of_memory_above(samples: int, patched: pytest.MonkeyPatch) -> list[int]:
    """A machine whose memory holds the attacker's second derivatives for so many samples; what it was asked for."""
    from fedprism.attacks.gradient_matching.forward import PreparedForward

    asked: list[int] = []
    real = PreparedForward.__call__

    def bounded(self: PreparedForward, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        asked.append(len(inputs))
        if len(inputs) > samples:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, inputs, labels)

    patched.setattr(PreparedForward, "__call__", bounded)
    return asked


def test_a_cell_that_needs_too_much_memory_works_on_less_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = planned(MATCHED)
    (whole,) = run_audit(setup, tmp_path / "whole")
    with monkeypatch.context() as patched:
        asked = short_of_memory_above(2, patched)
        (parts,) = run_audit(setup, tmp_path / "parts")
    assert [size for size in asked if size > 2] == [8, 4], "halved until it fits"
    assert (parts.state, parts.memory_share, whole.memory_share) == ("done", 0.25, 1.0)
    # L-BFGS makes much of a rounding error, so the whole batch ends elsewhere; in double precision the answers of the
    # whole and of its parts agree (test_memory.py).
    quarters = run_trial(trial_of(setup, lay_out(setup).cells[0]), memory_share=0.25)
    assert parts.record is not None
    assert quarters.record is not None
    assert as_json(parts.record.scores) == as_json(quarters.record.scores)
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["memory_shares"] == {parts.key: 0.25}
    assert "share" not in (tmp_path / "parts" / "results.json").read_text(), "it says something about a machine"


@pytest.mark.parametrize(
    ("plan", "holds", "tried", "words"),
    [
        (MATCHED, 0, [8, 2, 2, 2], "even with 1/8 of the usual amount at a time"),
        (
            MATCHED.replace("lenet", "resnet18").replace("digits", "photos"),
            2,
            [8, 8],
            "even with 1/2 of the usual amount at a time",
        ),
        (MATCHED.replace("[8]", "[1]"), 0, [1], "more than there is; use a smaller batch"),
    ],
    ids=["down to one sample", "batch norm sees the whole batch", "nothing to split"],
)
def test_what_cannot_be_split_further_fails_in_one_sentence(
    plan: str, holds: int, tried: list[int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = short_of_memory_above(holds, monkeypatch)
    (finished,) = run_audit(planned(plan), tmp_path / "out")
    assert finished.state == "failed"
    assert finished.reason.startswith("out of memory: ")
    assert words in finished.reason
    assert [size for size in asked if size > holds] == tried


def test_clients_whose_batch_is_too_large_train_on_parts_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the attack itself is a closed form, with nothing to split."""
    plan = planned(SMALL.replace("[1, 2]", "[6]").replace("[0, 1]", "[0]").replace('"none", ', ""))
    (whole,) = run_audit(plan, tmp_path / "whole")
    real = update._gradient

    def bounded(model: Any, params: Any, held: Any, batch: fp.Batch, *rest: Any) -> Any:
        if len(batch) > 3:
            raise MemoryError
        return real(model, params, held, batch, *rest)

    monkeypatch.setattr(update, "_gradient", bounded)
    (parts,) = run_audit(plan, tmp_path / "parts")
    assert (parts.state, parts.memory_share) == ("done", 0.5)
    assert whole.record is not None
    assert parts.record is not None
    assert whole.record.scores is not None
    assert parts.record.scores is not None
    assert parts.record.scores["means"]["psnr"] == pytest.approx(whole.record.scores["means"]["psnr"], abs=0.1)


@pytest.mark.parametrize(
    "killed", ["the task's process ended by SIGKILL (out of memory, perhaps)", "ended: OutOfMemoryError: node is low"]
)
def test_a_process_that_was_killed_is_tried_with_less(
    killed: str, store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = planned(SMALL)
    cells = lay_out(setup).cells[:1]
    shares: list[float] = []

    def run(self: Processes, function: Any, tasks: Any) -> Any:
        shares.append(function.keywords["memory_share"])
        small = shares[-1] <= 0.25
        done = Outcome(key=cells[0].key, description=cells[0].description, state="done")
        yield 0, done if small else Failure(killed)

    monkeypatch.setattr(Processes, "run", run)
    (found,) = run_trials([trial_of(setup, cell) for cell in cells], store, Processes(workers=1))
    assert found.state == "done"
    assert shares == [1.0, 0.5, 0.25]


def test_a_folder_is_continued_only_on_purpose_and_with_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run_audit(planned(SMALL), out)
    results = (out / "results.json").read_bytes()
    with pytest.raises(BadInput, match="--resume"):
        run_audit(planned(SMALL), out)
    with pytest.raises(BadInput, match=r"the plan changed.*grid\.seeds"):
        run_audit(planned(SMALL.replace("seeds = [0, 1]", "seeds = [0, 1, 2]")), out, resume=True)
    other = written(tmp_path, SMALL.replace('"psnr"', '"mse"'))
    assert cli.main(["audit", str(other), "-o", str(out), "--resume"]) == 2
    assert "was started: scores.metrics." in sentence(capsys)
    assert (out / "results.json").read_bytes() == results


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    text = SMALL.replace('name = "digits"', 'npz = "mine.npz"')
    for number in range(2):
        inputs = np.random.default_rng(number).random((20, 6), dtype=np.float32)
        np.savez(tmp_path / "mine.npz", inputs=inputs, labels=np.arange(20) % 2)
        setup = prepare(written(tmp_path, text + f"# {number}\n"))
        if number == 0:
            run_audit(setup, tmp_path / "out")
            continue
        with pytest.raises(BadInput, match=r"fingerprint\.data"):
            run_audit(setup, tmp_path / "out", resume=True)


FULL = """
import resource, sys
from fedprism import cli
from fedprism.audit import prepare
prepare(sys.argv[1]).materials()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # no file may grow beyond this: a disk that is full
from fedprism.audit import run_audit
from fedprism.errors import BadInput
try:
    run_audit(prepare(sys.argv[1]), sys.argv[2])
except BadInput as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_records_intact(tmp_path: Path) -> None:
    plan, out = written(tmp_path), tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(plan), str(out)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "cannot be written" in done.stdout
    assert "--resume" in done.stdout
    assert done.stdout.count("\n") == 1
    kept = {path: path.read_bytes() for path in out.glob("records/*.json")}
    run_audit(prepare(plan), out, resume=True)
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert len(load_audit(out)) == 8


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["audit", str(written(tmp_path)), "-o", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in sentence(capsys)


def test_two_audits_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BadInput, match="another audit is running"):
        run_audit(planned(SMALL), tmp_path)


def test_a_thousand_cells_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = planned(SMALL.replace("seeds = [0, 1]", f"seeds = {list(range(250))}"))
    real = run_trial(trial_of(setup, lay_out(setup).cells[0]))
    alive: list[int] = []

    def quick(trial: Runnable, **options: Any) -> Outcome:
        return replace(real, key=trial.key, description=trial.description)

    def listen(progress: execution.AuditProgress) -> None:
        if progress.done % 250 == 0:
            alive.append(sum(type(thing) is Outcome for thing in gc.get_objects()))

    monkeypatch.setattr(trials_execution, "run_trial", quick)
    audit = run_audit(setup, tmp_path / "out", listen=listen)
    assert len(audit) == len(list(tmp_path.glob("out/records/*.json"))) == 1000
    assert len(alive) == 5
    assert max(alive) < 20, "cells are not kept once they are written"
    for number, _ in enumerate(audit):
        if number % 250 == 0:
            assert sum(type(thing) is Outcome for thing in gc.get_objects()) < 20, "records are read one at a time"
