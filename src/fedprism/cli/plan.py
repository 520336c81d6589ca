"""`fedprism plan`: commented plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.terminal import console_for

plans = typer.Typer(help="Write plans for `fedprism audit`.", no_args_is_help=True)


@plans.command("init")
def plan_init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan.")] = Path("plan.toml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model of `fedprism list models`, or pkg.module:factory.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="A data set of `fedprism list data`, or your folder, npz or csv.")
    ] = None,
) -> None:
    """Write a commented plan; without a model one on embedded photographs that runs in about a minute."""
    from fedprism.cli import auditing

    auditing.write_plan(output, model, data, console_for())
