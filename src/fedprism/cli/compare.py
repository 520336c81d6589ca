"""`fedprism compare`: what changed between two audits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import OpenPage, Page
from fedprism.cli.terminal import answer


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="The folder of the earlier audit.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The folder of the later audit.")],
    open_page: OpenPage = False,
    output: Page = None,
) -> None:
    """Show what changed between two audits, as one HTML page."""
    from fedprism import report

    page = report.write_comparison(before, after, output=output)
    answer({"page": str(page)}, lambda: [f"Comparison: {page}"])
    if open_page:
        typer.launch(page.resolve().as_uri())
