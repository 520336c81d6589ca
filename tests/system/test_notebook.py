"""The notebook of the documentation runs, and what it keeps is what the code shows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from notebook_pages import checked, pictures

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"-?\b\d[\d.]*(e[-+]?\d+)?|∞")
MOST_BYTES = 200_000


def runner() -> ModuleType:
    described = importlib.util.spec_from_file_location("docs_notebooks", DOCS / "notebooks.py")
    assert described is not None
    assert described.loader is not None
    found = importlib.util.module_from_spec(described)
    described.loader.exec_module(found)
    return found


def texts(output: dict[str, Any]) -> dict[str, str]:
    """What an output shows, by kind."""
    shown = output.get("data", {"text/plain": output.get("text")})
    return {kind: "".join(lines) for kind, lines in shown.items()}


def without_numbers(text: str) -> str:
    """Pictures and last digits differ between CPUs."""
    return NUMBER.sub("#", re.sub(r"base64,[^\"]+", "", text))


def test_the_notebook_shows_what_its_code_shows(pytestconfig: pytest.Config) -> None:
    module = runner()
    notebook = json.loads(module.NOTEBOOK.read_text())
    kept = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = module.outputs(notebook)
    assert [len(each) for each in shown] == [len(each) for each in kept]
    if pytestconfig.getoption("--shift-seeds"):
        return  # other samples, other words
    for old, new in zip([o for cell in kept for o in cell], [o for cell in shown for o in cell], strict=True):
        before, now = texts(old), texts(new)
        assert {kind: without_numbers(text) for kind, text in before.items()} == {
            kind: without_numbers(text) for kind, text in now.items()
        }, "run python docs/notebooks.py"


def test_the_notebook_is_small_safe_and_of_no_machine() -> None:
    path = runner().NOTEBOOK
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < MOST_BYTES
    assert notebook["nbformat"] == 4
    pages = [texts(o)["text/html"] for c in notebook["cells"] for o in c.get("outputs", []) if "text/html" in texts(o)]
    assert sum(len(pictures(page)) for page in pages) >= 12
    for page in pages:
        checked(page)
    assert not re.search(r"/tmp/|/home/|/Users/|/work/|/root/", path.read_text())
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_links_of_the_notebook_lead_somewhere() -> None:
    notebook = json.loads(runner().NOTEBOOK.read_text())
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets
    assert all((DOCS / "tutorials" / target).exists() for target in targets)
