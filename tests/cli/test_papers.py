"""`fedprism reproduce` and `list recipes` need the distribution fedprism-papers, and say so where it is missing."""

from __future__ import annotations

import pytest

from fedprism import cli
from fedprism.cli import papers


@pytest.mark.parametrize("command", [["reproduce", "cpa-table-1", "--quick"], ["list", "recipes"]])
def test_without_the_papers_one_sentence_names_the_install_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(papers, "entry_points", lambda group: [])
    assert cli.main(command) == 2
    assert "pip install ./papers" in capsys.readouterr().err


def test_the_papers_are_found_through_their_entry_point() -> None:
    pytest.importorskip("fedprism_papers")
    assert "cpa-table-1" in papers.papers().RECIPES
