"""A small plan, and what tests of audits do with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprism.audit import parse_plan, prepare
from fedprism.audit.materials import Setup

START = '[model]\nname = "fc2"\nkwargs = { hidden = 32 }\n[data]\nname = "digits"\n'
SMALL = START + (
    '[grid]\nattacks = ["dense-inversion"]\nthreats = ["honest_but_curious"]\nbatch_sizes = [1, 2]\nseeds = [0, 1]\n'
    'defenses = ["none", {name = "prune", ratio = 0.9}]\n[scores]\nmetrics = ["psnr"]\npictures = 1\nceiling = false\n'
)
MATCHED = START.replace("fc2", "lenet").replace("kwargs = { hidden = 32 }\n", "") + (
    '[grid]\nattacks = [{name = "idlg", iterations = 3}]\nthreats = ["honest_but_curious"]\nbatch_sizes = [8]\n'
    'seeds = [0]\n[scores]\nmetrics = ["psnr"]\npictures = 0\nceiling = false\n'
)


def planned(text: str) -> Setup:
    return prepare(parse_plan(text))


def written(folder: Path, text: str = SMALL) -> Path:
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1
    return printed.strip().splitlines()[-1]
