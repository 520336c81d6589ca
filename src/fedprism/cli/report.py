"""`fedprism report`: the page of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import OpenPage, Page
from fedprism.cli.terminal import answer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an audit.")],
    show_images: Annotated[
        bool | None,
        typer.Option(
            "--show-images/--redact",
            help="Show private samples, or scores alone; default: scores alone for captures and files of your own.",
        ),
    ] = None,
    open_page: OpenPage = False,
    output: Page = None,
) -> None:
    """Write the report of an audit as one HTML file."""
    from fedprism import report

    page = report.write(folder, show_images=show_images, output=output)
    answer({"page": str(page)}, lambda: [f"Report: {page}"])
    if open_page:
        typer.launch(page.resolve().as_uri())
