"""The tables of `fedprism list`, made from the same tables that the commands look names up in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from rich import box
from rich.table import Table

from fedprism.attacks import flags


def attacks() -> Table:
    from fedprism.attacks import ATTACKS

    made = {name: make() for name, make in ATTACKS.items()}
    return _table(
        ("attack", "what it does, and whose it is", "needs", "flags and defaults"),
        (
            (
                name,
                f"{_summary(ATTACKS[name])}\n{attack.citation}",
                "\n".join(sorted(attack.needs)),
                flags.usage(attack),
            )
            for name, attack in made.items()
        ),
    )


def defenses() -> Table:
    from fedprism.defenses import DEFENSES

    rows = ((name, _summary(kind), _settings(kind)) for name, kind in DEFENSES.items())
    return _table(("defense", "what it does", "settings"), rows)


def metrics() -> Table:
    from fedprism.metrics import METRICS

    rows = (
        (name, metric.summary, "higher" if metric.higher_is_better else "lower") for name, metric in METRICS.items()
    )
    return _table(("metric", "what it measures", "closer when"), rows)


def models() -> Table:
    from fedprism.models import MODELS

    rows = ((name, _summary(make), _settings(make)) for name, make in MODELS.items())
    return _table(("model", "what it is", "settings"), rows)


def data() -> Table:
    from fedprism.data import DATASETS
    from fedprism.data.ondisk import OnDisk
    from fedprism.data.tabular import TABLES

    def described(loader: Callable[..., object]) -> str:
        if not isinstance(loader, OnDisk):
            return _summary(loader)
        return f"your own files: {', '.join(place for place, _ in loader.places)}"

    rows = ((name, described(loader), _settings(loader)) for name, loader in {**DATASETS, **TABLES}.items())
    return _table(("data set", "what it is", "settings"), rows)


def threats() -> Table:
    from fedprism.threats import THREATS

    rows = (
        (name, f"{threat.summary}\nSees the {threat.sees}.", ", ".join(sorted(threat.grants)))
        for name, threat in THREATS.items()
    )
    return _table(("threat", "who it is", "knows"), rows)


def recipes() -> Table:
    from fedprism.cli.papers import papers

    rows = ((name, recipe.summary, recipe.citation) for name, recipe in papers().RECIPES.items())
    return _table(("recipe", "what it runs again", "whose it is"), rows)


TABLES: dict[str, Callable[[], Table]] = {
    "attacks": attacks,
    "defenses": defenses,
    "metrics": metrics,
    "models": models,
    "data": data,
    "threats": threats,
    "recipes": recipes,
}


def _table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
        table.add_section()
    return table


def _summary(thing: Callable[..., object]) -> str:
    """The first line of its documentation."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _settings(thing: Callable[..., object]) -> str:
    parameters = inspect.signature(thing).parameters.values()
    return ", ".join(p.name if p.default in (p.empty, None) else f"{p.name}={p.default}" for p in parameters)
