"""Where the papers stand: the page is what its numbers give, and a run's numbers come in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedprism.errors import BadInput
from fedprism_papers import MODULES

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import stand

PAGES = list(stand.HERE.rglob("papers-stand.md"))


def test_the_page_is_made_from_the_numbers() -> None:
    assert [page.read_text() for page in PAGES] == [stand.page()], "run python docs/stand.py"
    assert stand.as_text(stand.stand()) == stand.NUMBERS.read_text()


def test_every_command_is_of_a_recipe() -> None:
    commands = " ".join(item["command"] or "" for item in stand.stand()).replace(",", "").split()
    named = {word for word in commands if "-" in word and not word.startswith(("-", "("))}
    assert named <= set(MODULES)
    recipes = {name for name in MODULES if any(part in name for part in ("table", "fig"))}
    assert recipes - named <= {"disaggregation-fig-4", "disaggregation-fig-5", "disaggregation-fig-6"}  # "-fig-3 (to"


@pytest.mark.parametrize(
    ("paper", "measured", "lower", "expected"),
    [(0.5, 0.54, True, "reproduced"), (0.5, 0.4, True, "better"), (0.5, 0.6, True, "worse"), (10, 12, False, "better")],
)
def test_verdicts(paper: float, measured: float, lower: bool, expected: str) -> None:
    assert stand.verdict({"paper": paper, "measured": measured}, lower) == expected


def test_a_runs_numbers_replace_those_of_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand, "NUMBERS", tmp_path / "stand.json")
    number = {"cell": "some, 8 images", "method": "CPA", "paper": 0.2, "measured": 0.3, "ours": False}
    item = {"recipe": "made-up", "measure": "LPIPS", "cell": ["data", "n"], "columns": {"CPA": ["P", "M", False]}}
    stand.NUMBERS.write_text(stand.as_text([{**item, "numbers": [number]}]))
    row = {"cell": {"data": "some", "n": 8}, "entries": {"P": 0.2, "M": {"mean": {"LPIPS": 0.1}}}}
    results = {"recipe": "made-up", "complete": True, "settings": {"quick": False}, "rows": [row]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert stand.add(tmp_path) == 1
    assert stand.stand()[0]["numbers"] == [{**number, "measured": 0.1}]
    (tmp_path / "results.json").write_text(json.dumps(results | {"settings": {"quick": True}}))
    with pytest.raises(BadInput, match="not a quick one"):
        stand.add(tmp_path)
