"""`fedprism init`: a commented plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan.")] = Path("plan.toml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model of `fedprism list models`, or pkg.module:factory.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="pkg.module:factory, a data set by name, or a folder, npz or csv."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="LOSS", help="A name, or pkg.module:function; default: one that fits.")
    ] = None,
) -> None:
    """Write a commented plan with defenses whose strengths fit the model; by default for embedded photographs."""
    from fedprism.cli import auditing

    auditing.write_plan(output, model, data, loss)
