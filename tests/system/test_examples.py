"""Every example runs as it stands, from any folder, and is short enough to read at a glance."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

OF_PROCESSES = ('if __name__ == "__main__":', "flwr")
"""What is in an example that starts processes, by hand or by Flower: it needs one of its own."""
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    if any(word in path.read_text() for word in OF_PROCESSES):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert subprocess.run([sys.executable, str(path)], timeout=600).returncode == 0
    else:  # a process of its own would spend most of its time on imports
        runpy.run_path(str(path), run_name="__main__")
    assert capfd.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_does(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.startswith('"""')
