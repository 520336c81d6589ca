"""`fedprism show`: one name of a table in full."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fedprism.cli.terminal import answer


class Kind(StrEnum):
    """Kinds of names, each with its table of `fedprism list`."""

    ATTACK = "attack"
    DEFENSE = "defense"
    METRIC = "metric"
    MODEL = "model"
    DATA = "data"
    THREAT = "threat"
    RECIPE = "recipe"


def show(
    kind: Annotated[Kind, typer.Argument(help="The kind of name.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `fedprism list`.")],
) -> None:
    """Show an attack, defense, model or other name in full: what it does, what it needs, and its settings."""
    from fedprism.checks import row
    from fedprism.cli import tables

    table = tables.TABLES[kind if kind is Kind.DATA else f"{kind}s"]()
    entry = row({each.name: each for each in table}, name, kind.value)
    answer(entry.as_dict(), lambda: tables.lines(entry))
