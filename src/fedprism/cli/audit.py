"""`fedprism audit`: its flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import DataDir, Device, Download, Output


def audit(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; `fedprism init` writes one.")],
    output: Output = Path("fedprism-audit"),
    resume: Annotated[bool, typer.Option("--resume", help="Finish an audit that was stopped.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of runs at a time, one process per run.")
    ] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster, or local to start one.")] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Exit with 1 if a configuration's mean exceeds VALUE; max-METRIC checks each sample.",
        ),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="The same for metrics of which lower means more leaks, such as mse."),
    ] = None,
    fail_ceiling_above: Annotated[
        float | None,
        typer.Option(metavar="VALUE", help="Exit with 1 if the bound on all attackers exceeds VALUE or is unknown."),
    ] = None,
    allow_inconclusive: Annotated[
        bool, typer.Option("--allow-inconclusive", help="Let checks pass if attacks failed without a low ceiling.")
    ] = False,
    allow_untested: Annotated[
        bool, typer.Option("--allow-untested", help="Exit with 0 instead of 2 if no attack ran to completion.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, their time and memory.")] = False,
    data_dir: DataDir = None,
    allow_download: Download = False,
    device: Device = None,
) -> None:
    """Run the audit of a plan: what leaks, to whom, and what defenses change. Interrupted? Continue with --resume."""
    from fedprism.audit.gates import Checks, Gate, parse_gate
    from fedprism.cli import auditing

    def checks(metrics: Sequence[str]) -> Checks:
        gates = [parse_gate(text, metrics) for text in fail_above or ()]
        gates += [parse_gate(text, metrics, "below") for text in fail_below or ()]
        if fail_ceiling_above is not None:
            gates.append(Gate(kind="ceiling-above", limit=fail_ceiling_above))
        return Checks(gates=tuple(gates), allow_inconclusive=allow_inconclusive, allow_untested=allow_untested)

    code = auditing.carry_out(
        plan,
        output,
        resume=resume,
        workers=workers,
        ray=ray,
        checks=checks,
        dry_run=dry_run,
        data_dir=data_dir,
        allow_download=allow_download,
        device=device,
    )
    raise typer.Exit(code)
