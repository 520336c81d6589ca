"""`fedprism list`: names, one per line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fedprism.cli.terminal import PRINTING, answer


class Table(StrEnum):
    """Tables of names."""

    ATTACKS = "attacks"
    DEFENSES = "defenses"
    METRICS = "metrics"
    MODELS = "models"
    DATA = "data"
    THREATS = "threats"
    RECIPES = "recipes"


def list_table(table: Annotated[Table, typer.Argument(help="The table.")]) -> None:
    """List available attacks, defenses, models and more, one per line; -v adds their settings."""
    from fedprism.cli import tables

    entries = tables.TABLES[table]()
    shown = tables.in_full if PRINTING.verbose else tables.in_short
    answer([entry.as_dict() for entry in entries], lambda: shown(entries))
