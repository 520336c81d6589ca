"""Progress: reported to whoever listens, and shown in notebooks, on terminals, and nowhere else."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import fedprism as fp
from fedprism.runtime import progress
from notebook_pages import checked


class Kernel:
    """Stands for IPython in a kernel: keeps every page that a place was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[str] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
        display.HTML = str  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        ipython.display = display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, page: str, *, display_id: bool) -> Any:
        assert display_id
        self.pages.append(page)
        return SimpleNamespace(update=self.pages.append)


def test_a_notebook_gets_a_bar_that_ends_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    with progress.showing("<attack>"):
        for done in range(1, 1001):
            progress.report(done, 1000)
    assert kernel.pages[0] == "&lt;attack&gt; <progress></progress>"
    assert kernel.pages[-2] == '&lt;attack&gt; <progress value="1000" max="1000"></progress> 1000 of 1000'
    assert kernel.pages[-1] == ""
    for page in kernel.pages:
        checked(page)


def test_a_notebook_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, clock = Kernel(monkeypatch), iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock) / 1000)  # a millisecond per report
    with progress.showing():
        for done in range(999):
            progress.report(done, 1000)
    assert len(kernel.pages) == 1 + 4 + 1


def test_the_bar_ends_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    with pytest.raises(ValueError, match="stop"), progress.showing():
        raise ValueError("stop")
    assert kernel.pages[-1] == ""


def test_a_terminal_gets_a_bar_and_a_file_nothing() -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        with progress.showing("attack", Console(file=stream, force_terminal=terminal)):
            progress.report(1, 2)
        assert ("attack" in stream.getvalue()) == terminal


def test_run_shows_progress_only_when_asked(monkeypatch: pytest.MonkeyPatch, digits: fp.data.ImageSet) -> None:
    kernel = Kernel(monkeypatch)
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=4, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=[digits.draw(1, seed=0)])
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    attack = fp.attacks.inverting_gradients(iterations=5)
    plain = fp.run(attack, observation, seed=0)
    assert kernel.pages == []
    shown = fp.run(attack, observation, seed=0, progress=True)
    assert any("<progress value=" in page for page in kernel.pages)
    assert plain.tensor.equal(shown.tensor), "watching changes no number"
