"""`fedprism demo`: the audit of the plan that `fedprism init` writes."""

from __future__ import annotations

from pathlib import Path

import typer

from fedprism.cli.options import Device, Output
from fedprism.errors import BadInput


def demo(output: Output = Path("fedprism-demo"), device: Device = None) -> None:
    """Audit a small network on embedded photographs, in about a minute on two cores: verdict, table and report."""
    from fedprism.audit import proposing
    from fedprism.cli import auditing
    from fedprism.files import publishing

    publishing.require_writable(output)
    plan, content = output / "plan.toml", proposing.proposed(None, None, output).encode()
    if plan.exists() and plan.read_bytes() != content:
        raise BadInput(
            f"'{plan}' is a plan of your own, which the demo would overwrite. Choose another folder with -o."
        )
    publishing.publish(output, {plan.name: content})
    # What an earlier demo found stays: the same plan gives the same numbers.
    code = auditing.carry_out(plan, output, resume=True, device=device)
    raise typer.Exit(code)
