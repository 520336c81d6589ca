"""A full disk and a folder that may not be written: one sentence, exit code 2, and what was there stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedprism as fp
from fedprism import captures

PLAN = """
[model]
name = "fc2"
kwargs = { hidden = 16 }
[data]
name = "patients"
[grid]
batch_sizes = [1]
threats = ["honest_but_curious"]
attacks = ["dense-inversion"]
seeds = [0, 1]
[scores]
metrics = ["mse"]
"""

COMMANDS = {
    "attack": ["attack", "capture", "--attack", "dense-inversion", "-o", "OUT"],
    "reproduce": ["reproduce", "gradattack-fig-2", "--quick", "--batches", "1", "-o", "OUT"],
    "audit": ["audit", "plan.toml", "-o", "OUT"],
}

BEGINNING = """
import contextlib, ctypes, io, json, os, resource, signal, sys
from pathlib import Path

from fedprism.cli import main

commands, told = json.loads(sys.argv[1]), {}


def call(name, folder, *more):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([folder if word == "OUT" else word for word in commands[name]] + list(more))
    return {"code": code, "said": said.getvalue(), "files": contents(folder)}


def contents(folder):
    return {str(path): path.read_bytes().hex() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
"""

FULL = (
    BEGINNING
    + """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)


def full_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))  # no file may grow beyond this
    try:
        return call(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


for name in commands:
    more = ("--resume",) if name == "audit" else ()
    told[name] = [full_disk(name, name), call(name, name, *more), full_disk(name, name, *more)]
print(json.dumps(told))
"""
)

LOCKED = (
    BEGINNING
    + """
if os.geteuid() == 0:  # root may write anywhere, unless it gives up its capabilities
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) or os.access("locked", os.W_OK):
        sys.exit(77)
for name in commands:
    told[name] = [call(name, "locked"), call(name, "locked/below")]
print(json.dumps(told))
"""
)

Calls = dict[str, list[dict[str, Any]]]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and capabilities are Linux's")


def played(program: str, place: Path) -> Calls:
    """Run every command as the program says; by command its calls: exit code, what it said, the files it left."""
    digits = fp.data.load("digits").batch([0])
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=[digits])
    captures.save(fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)[0], place / "capture")
    (place / "plan.toml").write_text(PLAN)
    (place / "locked").mkdir()
    (place / "locked" / "earlier.txt").write_text("earlier results")
    (place / "locked").chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(COMMANDS)],
            cwd=place,
            # Python itself would leave half a compiled module behind, on which every later import fails.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        (place / "locked").chmod(0o755)
    if done.returncode == 77:
        pytest.skip("root cannot give up its right to write anywhere here")
    assert done.returncode == 0, done.stderr
    found: Calls = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return played(FULL, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return played(LOCKED, tmp_path_factory.mktemp("locked"))


def refused(call: dict[str, Any]) -> str:
    """The one line of a complaint."""
    assert call["code"] == 2, call["said"]
    (line,) = [line for line in call["said"].splitlines() if line.startswith("error:")]
    assert line.endswith("."), line
    assert "Traceback" not in call["said"]
    return str(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told_and_leaves_nothing_half_written(command: str, full: Calls) -> None:
    first, _, _ = full[command]
    assert "cannot be written" in refused(first)
    assert [name for name in first["files"] if Path(name).name != ".lock"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_leaves_earlier_results_as_they_were(command: str, full: Calls) -> None:
    _, earlier, later = full[command]
    assert earlier["code"] == 0, earlier["said"]
    assert earlier["files"]
    assert "cannot be written" in refused(later)
    assert later["files"] == earlier["files"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_written_is_told_and_left_alone(command: str, locked: Calls) -> None:
    for call, name in zip(locked[command], ("locked", "below"), strict=True):
        assert name in refused(call)
    assert locked[command][0]["files"] == {"locked/earlier.txt": b"earlier results".hex()}
    assert locked[command][1]["files"] == {}
