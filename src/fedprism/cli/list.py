"""`fedprism list`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fedprism.cli.terminal import console_for


class Table(StrEnum):
    """What `fedprism list` can list."""

    ATTACKS = "attacks"
    DEFENSES = "defenses"
    METRICS = "metrics"
    MODELS = "models"
    DATA = "data"
    THREATS = "threats"
    RECIPES = "recipes"


def list_table(table: Annotated[Table, typer.Argument(help="What to list.")]) -> None:
    """List what there is, by the names that commands, captures and records use."""
    from fedprism.cli import tables

    console_for().print(tables.TABLES[table]())
