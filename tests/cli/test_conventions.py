"""What every command has in common: short flags, JSON, help that explains everything, complaints said once."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer

from fedprism import cli
from fedprism.cli.entry import app
from fedprism.cli.tables import TABLES

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_is_explained(name: str) -> None:
    unexplained = [parameter.name for parameter in COMMANDS[name].params if not getattr(parameter, "help", None)]
    assert unexplained == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_short_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "-h"]) == 0
    help_text = capsys.readouterr().out
    assert all(flag in help_text for flag in ("--quiet", "--verbose", "--json", "-q", "-v"))


def test_help_explains_positional_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "-h"]) == 0
    assert re.search(r"PLAN\.toml\s+The plan", capsys.readouterr().out)


@pytest.mark.parametrize("table", TABLES)
def test_lists_have_one_line_per_name(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", table]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [entry.name for entry in TABLES[table]()]


@pytest.mark.parametrize("table", TABLES)
def test_what_is_listed_can_be_shown_and_read_by_programs(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", table, "--json"]) == 0
    listed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    kind = table if table == "data" else table.removesuffix("s")
    assert cli.main(["show", kind, listed[0]["name"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == listed[0]
    assert cli.main(["show", kind, listed[0]["name"]]) == 0
    assert capsys.readouterr().out.startswith(f"{listed[0]['name']}: ")


def test_a_name_that_nothing_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "attack", "idgl"]) == 2
    assert "idlg" in capsys.readouterr().err


def test_the_help_of_an_attack_lists_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["attack", "--attack", "class-fishing", "--help"]) == 0
    of_fishing = capsys.readouterr().out
    assert cli.main(["attack", "--help"]) == 0
    of_all = capsys.readouterr().out
    assert "--label" in of_fishing
    assert "--label" not in of_all


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["lisst"], "error: No such command 'lisst'. Did you mean 'list'? See fedprism --help\n"),
        (["plan"], "error: No such command 'plan'. See fedprism --help\n"),
        (["audit"], "error: Missing argument 'PLAN.toml'. See fedprism audit --help\n"),
        (["audit", "nope.toml"], "error: nope.toml: no such file. Create one with: fedprism init\n"),
    ],
)
def test_mistakes_are_told_once_in_a_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr() == ("", complaint)


def test_flags_of_one_call_are_forgotten_by_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "metrics", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert cli.main(["list", "metrics"]) == 0
    assert capsys.readouterr().out.startswith("mse")
