"""Nothing reaches for the network unless it is told to: commands run in a Python that refuses to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUARD = """
import os, sys

EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}


def guard(event, arguments):
    if event not in EVENTS:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg") and not isinstance(arguments[1], tuple):
        return  # between processes of this machine
    with open(os.environ["CALLS"], "a") as file:  # whoever swallows the error is found out all the same
        print(event, arguments[-1], file=file)
    raise OSError("the network is out of bounds in this test")


sys.addaudithook(guard)
"""
"""As sitecustomize.py it is loaded by every Python that a command starts, workers included."""

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
defenses = ["none", { name = "gaussian-noise", std = 0.01 }]
seeds = [0]
[scores]
metrics = ["mse"]
"""

COMMANDS = """
import sys

from fedprism.audit import template
from fedprism.cli import main

less = template.text().replace("epochs = 5 ", "epochs = 1 ").replace("seeds = [0, 1] ", "seeds = [0] ")
less = less.replace("batch_sizes = [1, 8] ", "batch_sizes = [1] ").replace("# timed_steps = 21", "timed_steps = 0")
less = less.replace('lr = "search" ', "lr = 0.05 ")
template.text = lambda *_: less
for arguments in (
    ["demo", "-o", "demo"],
    *(["list", table] for table in ("attacks", "defenses", "metrics", "models", "data", "threats", "recipes")),
    ["reproduce", "gradattack-fig-2", "--quick", "-o", "recipe"],
    ["init", "-o", "embedded.toml"],
    ["audit", "plan.toml", "-o", "audit", "--workers", "2"],
):
    code = main(arguments)
    if code:
        sys.exit(f"{arguments}: {code}")
"""

SCORES = """
import fedprism as fp
import torch

images = fp.data.load("photos", size=32).batch([0, 1])
model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=16, classes=10, seed=0)
observation, truth = fp.simulate(fp.Scenario(model=model, clients=[images]), fp.threats.honest_but_curious, seed=0)
found = fp.run(fp.attacks.dense_inversion(), observation, seed=0)
scores = fp.score(found, truth, metrics=("psnr", "lpips-alex"))
print(scores)
assert "lpips-alex" in scores.unavailable, scores
"""


def guarded(program: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "guard").mkdir()
    (folder / "guard" / "sitecustomize.py").write_text(GUARD)
    calls = folder / "calls"
    kept = {name: value for name, value in os.environ.items() if name != "FEDPRISM_DATA"}
    paths = os.pathsep.join(filter(None, [str(folder / "guard"), os.environ.get("PYTHONPATH", "")]))
    around = {"PYTHONPATH": paths, "CALLS": str(calls), "TORCH_HOME": str(folder / "torch"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=kept | around, capture_output=True, text=True, timeout=300
    )
    return done, calls


@pytest.mark.parametrize("program", [COMMANDS, SCORES], ids=["commands", "LPIPS without its network"])
def test_nothing_is_asked_of_the_network(program: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    done, calls = guarded(program, tmp_path)
    assert not calls.exists(), calls.read_text()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://localhost/')",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket; socket.getaddrinfo(\"a\", 1)'])",
    ],
    ids=["socket", "url", "another process"],
)
def test_the_guard_sees_what_it_should(program: str, tmp_path: Path) -> None:
    _, calls = guarded(program, tmp_path)
    assert calls.exists()
