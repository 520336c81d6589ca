"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")]
Page = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; default: in the audit's folder.")
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Random seed.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; default: cuda if available.")]
Download = Annotated[bool, typer.Option("--allow-download", help="Let LPIPS download its network.")]
DataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder with the data sets; default: FEDPRISM_DATA names it.")
]
