"""The reference of the command line and of plans, read off the commands themselves."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from fedprism import cli
from fedprism.cli import tables
from fedprism.cli.command import PRINTED
from fedprism.cli.entry import app


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def commands() -> str:
    """Every command: what it does, its arguments and its options."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(part for name, command in group.commands.items() for part in _described(name, command))


def _described(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not _on_every_command(each)]
    words = " ".join(each.metavar or each.name.upper() for each in arguments)
    yield f"## `fedprism {name}`"
    yield f"`fedprism {name} {words} [OPTIONS]`".replace("  ", " ")
    yield " ".join((command.help or "").split())
    rows = [(f"`{each.metavar or each.name.upper()}`", _sentence(each)) for each in arguments]
    rows += [(_flags(each), _sentence(each)) for each in options]
    if rows:
        yield table(("argument or option", "meaning"), rows)


def _on_every_command(option: Any) -> bool:
    return getattr(option, "rich_help_panel", None) == PRINTED


def _flags(option: Any) -> str:
    value = "" if getattr(option, "is_flag", False) else f" {option.metavar or option.type.name.upper()}"
    flags = (*option.opts, *option.secondary_opts)
    return ", ".join(f"`{flag}{value if flag.startswith('--') else ''}`" for flag in flags)


def _sentence(parameter: Any) -> str:
    default = parameter.default
    told = " ".join((parameter.help or "").split())
    worth_telling = isinstance(default, (str, int, Path)) and default is not False and "default" not in told
    return f"{told} Default: `{default}`." if worth_telling and not parameter.required else told


def plan() -> str:
    """The plan that `fedprism init` writes for the embedded photographs."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                assert cli.main(["init", "--quiet"]) == 0
            text = Path("plan.toml").read_text()
        finally:
            os.chdir(here)
    return f"```toml\n{text.strip()}\n```"


def names(kind: str, *, without: Sequence[str] = ()) -> str:
    """One row per name of `fedprism list KIND`, without some of the columns."""
    entries = tables.TABLES[kind]()
    headings = list(dict.fromkeys(heading for entry in entries for heading in entry.facts if heading not in without))
    with_settings = any(entry.settings for entry in entries)
    rows = [
        (
            f"`{entry.name}`",
            entry.summary,
            *(entry.facts.get(heading, "–") for heading in headings),
            *(["<br>".join(f"`{each}`" for each in entry.settings) or "–"] if with_settings else []),
        )
        for entry in entries
    ]
    return table(("name", "summary", *headings, *(["settings"] if with_settings else [])), rows)
