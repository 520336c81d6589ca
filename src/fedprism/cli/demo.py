"""`fedprism demo`: the audit of the plan that `fedprism init` writes."""

from __future__ import annotations

from pathlib import Path

import typer

from fedprism.cli.options import Device, Output
from fedprism.errors import BadInput


def demo(output: Output = Path("fedprism-demo"), device: Device = None) -> None:
    """Audit an embedded scenario, about a minute on two cores: a table here and a report in HTML."""
    from fedprism.audit import proposing
    from fedprism.cli import auditing
    from fedprism.files import publishing

    publishing.require_writable(output)
    plan, content = output / "plan.toml", proposing.proposed(None, None, output).encode()
    if plan.exists() and plan.read_bytes() != content:
        raise BadInput(f"expected a folder without a plan of your own, found '{plan}'; choose another one with -o.")
    publishing.publish(output, {plan.name: content})
    # What an earlier demo found stays: the same plan gives the same numbers.
    code = auditing.carry_out(plan, output, resume=True, device=device)
    raise typer.Exit(code)
