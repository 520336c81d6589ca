"""`fedprism attack`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import Device, Download, Output, Seed
from fedprism.cli.terminal import console_for, progress_bar


def attack(
    capture: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE [--FLAG VALUE]...", help="The capture's folder, and settings of the attack."),
    ],
    name: Annotated[str, typer.Option("--with", metavar="NAME", help="An attack of `fedprism list attacks`.")],
    then: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attack each update that the first attack splits off with this.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:FACTORY", help="Function that returns the model; this imports your code."),
    ] = None,
    truth: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder with the truth, kept apart from the capture: adds scores.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(metavar="A,B,...", help="Scores to give, out of `fedprism list metrics`.")
    ] = "mse,psnr,ssim,avd",
    allow_download: Download = False,
    output: Output = Path("fedprism-attack"),
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Attack a captured update. The attack's own settings are flags too: `fedprism list attacks` names them."""
    from fedprism.cli import attacking

    siblings = (
        "--with",
        "--then",
        "--model",
        "--truth",
        "--metrics",
        "--allow-download",
        "--output",
        "--seed",
        "--device",
    )
    with progress_bar() as announce:
        announce(name)
        lines = attacking.carry_out(
            capture,
            name,
            then,
            siblings=siblings,
            model=model,
            truth=truth,
            metrics=[word.strip() for word in metrics.split(",")],
            allow_download=allow_download,
            output=output,
            seed=seed,
            device=device,
        )
    console = console_for()
    for line in lines:
        console.print(line, highlight=False)
