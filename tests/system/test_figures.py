"""README's pictures and figures are those that `make pictures` made, and the cheap ones are measured again."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    described = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(pictures: ModuleType) -> dict[str, Any]:
    return dict(json.loads(pictures.FIGURES.read_text()))


def test_readme_shows_what_was_written(pictures: ModuleType, figures: dict[str, Any]) -> None:
    assert pictures.filled(README, figures) == README, "run make pictures"


def test_a_changed_figure_is_found(pictures: ModuleType, figures: dict[str, Any]) -> None:
    first = figures["demo"][0]
    assert pictures.filled(README.replace(first, "PROTECTED"), figures) == README
    assert pictures.filled(README, {**figures, "demo": ["PROTECTED"]}) != README


def test_the_pictures_are_those_that_were_made(pictures: ModuleType, figures: dict[str, Any]) -> None:
    shown = {Path(target).name for target in re.findall(r"docs/pictures/[\w.-]+\.png", README)}
    assert shown == set(figures["pictures"])
    for name, digest in figures["pictures"].items():
        assert pictures.digest(pictures.PICTURES / name) == digest, "run make pictures"


def test_the_caption_holds(pictures: ModuleType, figures: dict[str, Any]) -> None:
    """Decibels at rounding error differ between CPUs, so the caption states a bound that all of them keep."""
    (bound,) = re.findall(r"each above (\d+) dB", README)
    measured, pixels = pictures.recovered()
    assert measured["photographs"] == figures["recovered"]["photographs"] == 8
    assert min(measured["lowest_psnr"], figures["recovered"]["lowest_psnr"]) > int(bound)
    height = (pixels.shape[0] - pictures.GAP) // 2
    assert abs(pixels[:height].astype(int) - pixels[-height:]).max() <= 1, "originals above recovered photographs"
