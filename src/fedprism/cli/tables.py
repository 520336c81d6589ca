"""What `fedprism list` and `fedprism show` know of each name, read off the tables that commands look names up in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from fedprism.attacks import flags


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name. `facts`: what else there is to say, by its heading; `settings` are written as they are given."""

    name: str
    summary: str
    facts: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "summary": self.summary, **self.facts, "settings": list(self.settings)}


def attacks() -> list[Entry]:
    from fedprism.attacks import ATTACKS

    made = {name: make() for name, make in ATTACKS.items()}
    return [
        Entry(
            name=name,
            summary=_summary(ATTACKS[name]),
            facts={
                "citation": attack.citation,
                "needs": ", ".join(sorted(attack.needs)) or "nothing but the update",
                "uses": ", ".join(sorted(attack.uses)) or "nothing else",
            },
            settings=tuple(flags.usage(attack).splitlines()),
        )
        for name, attack in made.items()
    ]


def defenses() -> list[Entry]:
    from fedprism.defenses import DEFENSES

    return [Entry(name=name, summary=_summary(kind), settings=_settings(kind)) for name, kind in DEFENSES.items()]


def metrics() -> list[Entry]:
    from fedprism.metrics import METRICS

    return [
        Entry(
            name=name,
            summary=metric.summary,
            facts={"closer when": "higher" if metric.higher_is_better else "lower"},
        )
        for name, metric in METRICS.items()
    ]


def models() -> list[Entry]:
    from fedprism.models import MODELS

    return [Entry(name=name, summary=_summary(make), settings=_settings(make)) for name, make in MODELS.items()]


def data() -> list[Entry]:
    from fedprism.data import DATASETS
    from fedprism.data.ondisk import OnDisk
    from fedprism.data.tabular import TABLES as MADE_UP

    def described(loader: Callable[..., object]) -> str:
        if not isinstance(loader, OnDisk):
            return _summary(loader)
        return f"your own files: {', '.join(place for place, _ in loader.places)}"

    return [
        Entry(name=name, summary=described(loader), settings=_settings(loader))
        for name, loader in {**DATASETS, **MADE_UP}.items()
    ]


def threats() -> list[Entry]:
    from fedprism.threats import THREATS

    return [
        Entry(
            name=name,
            summary=threat.summary,
            facts={"sees": f"the {threat.sees}", "knows": ", ".join(sorted(threat.grants))},
        )
        for name, threat in THREATS.items()
    ]


def recipes() -> list[Entry]:
    from fedprism.cli.papers import papers

    return [
        Entry(name=name, summary=recipe.summary, facts={"citation": recipe.citation})
        for name, recipe in papers().RECIPES.items()
    ]


TABLES: dict[str, Callable[[], list[Entry]]] = {
    "attacks": attacks,
    "defenses": defenses,
    "metrics": metrics,
    "models": models,
    "data": data,
    "threats": threats,
    "recipes": recipes,
}


def in_short(entries: Sequence[Entry]) -> list[str]:
    """One line per name."""
    width = max(len(entry.name) for entry in entries)
    return [f"{entry.name:<{width}}  {entry.summary}" for entry in entries]


def in_full(entries: Sequence[Entry]) -> list[Table]:
    """All that is known of each name."""
    headings = list(dict.fromkeys(heading for entry in entries for heading in entry.facts))
    table = Table("name", "summary", *headings, "settings", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for entry in entries:
        facts = (entry.facts.get(heading, "") for heading in headings)
        table.add_row(entry.name, entry.summary, *facts, "\n".join(entry.settings))
        table.add_section()
    return [table]


def lines(entry: Entry) -> Iterator[str]:
    """One name as text."""
    yield f"{entry.name}: {entry.summary}"
    for heading, fact in entry.facts.items():
        yield f"{heading}: {fact}"
    if entry.settings:
        yield "settings:"
        yield from (f"  {setting}" for setting in entry.settings)


def _summary(thing: Callable[..., object]) -> str:
    """The first line of its documentation."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _settings(thing: Callable[..., object]) -> tuple[str, ...]:
    parameters = inspect.signature(thing).parameters.values()
    return tuple(p.name if p.default in (p.empty, None) else f"{p.name}={p.default}" for p in parameters)
