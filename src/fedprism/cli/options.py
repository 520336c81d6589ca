"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same seed, same answer.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; default: cuda if available.")]
Download = Annotated[
    bool, typer.Option("--allow-download", help="Let LPIPS fetch its network; nothing else is fetched.")
]
