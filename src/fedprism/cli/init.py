"""`fedprism init`: a commented plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.terminal import console_for


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan.")] = Path("plan.toml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model of `fedprism list models`, or pkg.module:factory.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="A data set of `fedprism list data`, or your folder, npz or csv.")
    ] = None,
) -> None:
    """Write a commented plan with defenses whose strengths fit the model; by default on embedded photographs."""
    from fedprism.cli import auditing

    auditing.write_plan(output, model, data, console_for())
