"""`fedprism inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.terminal import PRINTING, console_for


def inspect(
    model_file: Annotated[Path, typer.Argument(metavar="MODEL.safetensors", help="The model that a client was sent.")],
    reference: Annotated[
        Path | None, typer.Option(metavar="REF.safetensors", help="The model of the round before, or a trusted one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:FACTORY", help="Function that returns the model; this imports your code."),
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Samples of your own: safetensors with inputs and labels.")
    ] = None,
) -> None:
    """Look for signs of tampering in a model before training on it. Exit code 1 if something is serious."""
    from fedprism import inspection
    from fedprism.inspection import files, rendering
    from fedprism.models import factory

    result = inspection.inspect(
        files.tensors(model_file),
        reference=files.tensors(reference) if reference is not None else None,
        model=factory.from_factory(model) if model is not None else None,
        batch=files.batch(batch) if batch is not None else None,
    )
    if PRINTING.json:
        typer.echo(rendering.as_json(result))
    else:
        console = console_for()
        if result.findings:
            console.print(rendering.table(result))
        console.print(rendering.summary(result))
    if result.serious:
        raise typer.Exit(1)
