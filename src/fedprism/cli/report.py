"""`fedprism report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.terminal import console_for
from fedprism.errors import BadInput


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="The folder of an audit; two with --compare.")],
    compare: Annotated[bool, typer.Option("--compare", help="What changed between two audits.")] = False,
    show_images: Annotated[
        bool | None,
        typer.Option(
            "--show-images/--redact",
            help="Show private samples, or scores alone: the default for captures and for files of your own.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; else in the audit's folder.")
    ] = None,
) -> None:
    """Write the report of an audit as one HTML file, or what changed between two audits."""
    from fedprism import report

    wanted = 2 if compare else 1
    if len(folders) != wanted:
        raise BadInput(f"expected {wanted} folder{'s' if compare else ''} of audits, found {len(folders)}; name them.")
    if compare:
        page = report.write_comparison(*folders, output=output)
    else:
        page = report.write(folders[0], show_images=show_images, output=output)
    console_for().print(f"The report: {page}", soft_wrap=True)
    if open_page:
        typer.launch(page.resolve().as_uri())
