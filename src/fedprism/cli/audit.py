"""`fedprism audit`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import Device, Download, Output
from fedprism.cli.terminal import console_for


def audit(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; `fedprism plan init` writes one.")],
    output: Output = Path("fedprism-audit"),
    resume: Annotated[bool, typer.Option("--resume", help="Finish an audit that was stopped.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cells at a time, a process each.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster, or local to start one.")] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit with 1 if a mean lies above; max-METRIC: if any sample does."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid, its time and its memory.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the data sets; else FEDPRISM_DATA names it.")
    ] = None,
    allow_download: Download = False,
    device: Device = None,
) -> None:
    """Run every cell of a plan: what leaks, to whom, and what defenses change. Killed at any time, --resume goes on."""
    from fedprism.cli import auditing

    code = auditing.carry_out(
        plan,
        output,
        console=console_for(),
        errors=console_for(stderr=True),
        resume=resume,
        workers=workers,
        ray=ray,
        fail_above=fail_above or (),
        dry_run=dry_run,
        data_dir=data_dir,
        allow_download=allow_download,
        device=device,
    )
    raise typer.Exit(code)
