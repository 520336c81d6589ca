"""The benchmark's table and its memory: what it prints, and when it warns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    described = importlib.util.spec_from_file_location("bench", BENCH / "bench.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    before = list(sys.path)
    try:
        described.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def comparison(bench: ModuleType, **changes: object) -> object:
    told = {"workload": "counting", "size": "3", "ours": 0.5, "other": "fingers", "theirs": 100.0}
    return bench.Comparison(**{**told, **changes})


def test_a_line_says_what_was_extrapolated(bench: ModuleType) -> None:
    assert "| about 100 s |" in bench.line(comparison(bench, extrapolated=True))
    assert "| 100 s |" in bench.line(comparison(bench))
    assert "| 200 x |" in bench.line(comparison(bench))


def test_every_line_has_as_many_columns_as_the_head(bench: ModuleType) -> None:
    head, rule, row = bench.markdown([comparison(bench)]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")


@pytest.mark.parametrize(("stored", "warnings"), [(200.0, 0), (299.0, 0), (301.0, 1)])
def test_a_ratio_that_fell_by_a_third_is_warned_about(bench: ModuleType, stored: float, warnings: int) -> None:
    assert len(bench.fallen([comparison(bench)], {"counting, 3, fingers": stored})) == warnings


def test_what_was_never_measured_is_no_reason_to_warn(bench: ModuleType) -> None:
    assert bench.fallen([comparison(bench)], {}) == []
