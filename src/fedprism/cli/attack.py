"""`fedprism attack`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedprism.cli.command import Command
from fedprism.cli.options import Device, Download, Output, Seed
from fedprism.cli.terminal import answer, progress_bar

FLAG = "--attack"
WORDS = "fedprism.words"
"""Under this key the context of the command keeps the words of the command line, for the help."""


class AttackCommand(Command):
    """The help with an attack named also lists the settings of that attack."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if (name := _named(ctx.meta.get(WORDS, ()))) is None:
            return
        from fedprism.checks import row
        from fedprism.cli import tables

        entry = row({each.name: each for each in tables.attacks()}, name, "attack")
        typer.echo("\n".join(tables.lines(entry)))


def _named(words: tuple[str, ...]) -> str | None:
    """The attack that a command line names."""
    for word, following in zip(words, (*words[1:], None), strict=True):
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            return value if equals else following
    return None


def attack(
    capture: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE [--FLAG VALUE]...", help="The capture's folder, and settings of the attack."),
    ],
    name: Annotated[str, typer.Option(FLAG, metavar="NAME", help="An attack of `fedprism list attacks`.")],
    then: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attack each update that the first attack splits off with this.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:FACTORY", help="Function that returns the model; this imports your code."),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder with the ground truth, kept apart from the capture: adds scores."),
    ] = None,
    metrics: Annotated[
        str, typer.Option(metavar="A,B,...", help="Scores to give, out of `fedprism list metrics`.")
    ] = "mse,psnr,ssim,avd",
    allow_download: Download = False,
    output: Output = Path("fedprism-attack"),
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Attack a captured update. The attack's settings are flags, too: `fedprism attack --attack NAME --help`."""
    from fedprism.cli import attacking

    siblings = (
        FLAG,
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
        record, lines = attacking.carry_out(
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
    answer(record, lambda: lines)
