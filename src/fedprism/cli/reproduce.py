"""`fedprism reproduce`: tables of papers, from the distribution fedprism-papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedprism.cli.options import DataDir, Device, Seed
from fedprism.cli.terminal import PRINTING, answer, progress_bar
from fedprism.errors import BadInput


def reproduce(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe of `fedprism list recipes`.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Embedded photographs and a small network: under a minute, no data folder.")
    ] = False,
    data_dir: DataDir = None,
    batches: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Batches per cell of the table; default: the recipe's own.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Batch sizes; default: the recipe's own.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Iterations of every iterated method; default: the recipe's own."),
    ] = None,
    inverted: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Images per batch to render from features; default: the recipe's own."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the results; default: fedprism-RECIPE."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of parts at a time, for recipes that have parts (research/recipes.md)."
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Choose the baselines' weights in N rehearsals; default: the published ones."
        ),
    ] = None,
    encodings: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Epochs of encodings for an attacker on mixed images; default: the recipe's own."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Compute only such rows; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the rows and what they took before; compute nothing.")
    ] = False,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Run a table of a paper again: its numbers beside those measured here."""
    from fedprism.checks import row
    from fedprism.cli.papers import papers
    from fedprism.files import publishing

    tables = papers()
    chosen = row(tables.RECIPES, recipe, "recipe")
    folder = output or Path(f"fedprism-{recipe}")
    settings = tables.Settings(
        quick=quick,
        batches=batches,
        sizes=_whole_numbers(sizes) if sizes is not None else None,
        iterations=iterations,
        inverted=inverted,
        encodings=encodings,
        tune=tune,
        only=tuple(only or ()),
        seed=seed,
        data_dir=data_dir,
        device=device,
        workers=workers,
    )
    if dry_run:
        rows = tables.planned(chosen, settings, lambda _: None)
        took = tables.recorded_time(chosen, settings, folder, len(rows))
        lines = [", ".join(f"{key}={value}" for key, value in row.items()) for row in rows]
        answer({"rows": rows, "time": took}, lambda: [*lines, f"{len(rows)} rows. {took}"])
        return
    publishing.require_writable(folder)
    with progress_bar() as announce:
        rows = tables.carry_out(chosen, settings, folder, announce)
    notes = [] if PRINTING.quiet else [f"- {note}" for note in tables.notes(chosen, settings, rows)]
    answer(
        json.loads((folder / "results.json").read_text()),
        lambda: [tables.table(chosen, rows), *notes, f"Table and pictures: {folder / 'table.md'}"],
    )


def _whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of "32,64"."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise BadInput(f"--sizes takes whole numbers such as 32,64, not '{text}'.") from error
