"""What a recipe leaves behind: a table in Markdown and in the terminal, the numbers, the times, the pictures."""

from __future__ import annotations

import json
import math
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from fedprism.display.html import png
from fedprism.errors import BadInput
from fedprism.experiments import ResultStore
from fedprism.files import json_text, publishing
from fedprism.runtime import devices
from fedprism_papers.shared.base import Announce, Entry, Measured, Recipe, Row, Settings
from fedprism_papers.shared.sheets import contact_sheet

ABSENT = "–"
STALE = ("table.md", "results.json", "run.json", "figure.svg", "recipe-*.png")
"""What an earlier run may have left in the folder."""

FINISHED = "finished"
"""The folder of finished cells: a run into the same folder goes on from them. One that is complete has none."""

WHERE = ("data_dir", "device", "finished", "workers", "listing")
"""Settings that do not decide any number."""

TIMED = ("time factor",)
"""Columns that differ from run to run: they go with the times."""

QUICK_NOTE = (
    "A quick run, to see that everything works: small cases and short baselines. The paper's numbers are for larger "
    "ones and are left out."
)

_FORMATS = {
    **dict.fromkeys(("PSNR", "best PSNR", "worst PSNR"), "{:.1f} dB"),
    **dict.fromkeys(("over 25 dB", "over 40 dB", "trials exact", "error of the sum"), "{:.0%}"),
    **dict.fromkeys(("columns right", "entries right", "certified", "certified wrong", "confirmed"), "{:.1%}"),
    **dict.fromkeys(("said", "said wrongly"), "{:.1%}"),
}


def carry_out(recipe: Recipe, settings: Settings, folder: Path, announce: Announce) -> list[Row]:
    """Run the recipe into the folder. What is finished lies there at any time, and says that there is more to come."""
    recipe.check(settings)
    start, rows = time.perf_counter(), list[Row]()
    settings = replace(settings, finished=folder / FINISHED)

    def publish(*, complete: bool) -> None:
        done = files(recipe, settings, rows, complete=complete, seconds=time.perf_counter() - start)
        publishing.publish(folder, done, stale=STALE)

    for row in recipe.run(settings, announce):
        if settings.chose(row.cell):
            rows.append(row)
            publish(complete=False)
    if settings.only and not rows:
        raise BadInput(
            f"--only: no row of {recipe.name} has {' and '.join(settings.only)}. See the rows with --dry-run."
        )
    publish(complete=True)
    ResultStore(folder / FINISHED).clear()
    return rows


def planned(recipe: Recipe, settings: Settings, announce: Announce) -> list[dict[str, str]]:
    """The rows that a run with these settings would compute; nothing is computed."""
    settings = replace(settings, listing=[])
    recipe.check(settings)
    for _ in recipe.run(settings, announce):
        pass
    return settings.listing or []


def recorded_time(recipe: Recipe, settings: Settings, folder: Path, rows: int) -> str:
    """How long so many rows may take, from an earlier run into the folder, in a sentence."""
    try:
        earlier = json.loads((folder / "run.json").read_text())
        per_row, effort = earlier["seconds"] / len(earlier["rows"]), json.loads((folder / "results.json").read_text())
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return f"No time is known: no earlier run of {recipe.name} is in {folder}."
    same = all(
        effort["settings"].get(name) == getattr(settings, name) for name in ("quick", "batches", "iterations", "tune")
    )
    return (
        f"About {per_row * rows:,.0f} s, from an earlier run into {folder} that took {per_row:,.1f} s per row"
        f"{'' if same else ' with other settings'}."
    )


def files(
    recipe: Recipe, settings: Settings, rows: Sequence[Row], *, complete: bool, seconds: float
) -> dict[str, bytes]:
    """All files of a run that has come this far."""
    return {
        **{name: png(picture) for name, _, picture, _ in _pictures(rows)},
        **({"figure.svg": recipe.figure(rows).encode()} if recipe.figure is not None else {}),
        "table.md": markdown(recipe, settings, rows, complete=complete).encode(),
        "run.json": _run_json(settings, rows, seconds),
        "results.json": _results_json(recipe, settings, rows, complete=complete),
    }


def table(recipe: Recipe, rows: Sequence[Row]) -> Table:
    """The table for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_legend(recipe), caption_justify="left")
    for column in _columns(rows):
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*_texts(recipe, row, rows))
    return shown


def notes(recipe: Recipe, settings: Settings, rows: Sequence[Row]) -> tuple[str, ...]:
    """What has to be known to read the table, each sentence once."""
    said = [QUICK_NOTE] if settings.quick else []
    said += [note for row in rows for note in row.notes]
    return tuple(dict.fromkeys([*said, *recipe.notes]))


def markdown(recipe: Recipe, settings: Settings, rows: Sequence[Row], *, complete: bool) -> str:
    """The same table with its notes and pictures as a page."""
    columns = _columns(rows)
    unfinished = [] if complete else ["**Unfinished: the run has not come to its end.**", ""]
    lines = [
        f"# {recipe.name}: {recipe.summary}",
        "",
        f"{recipe.citation}. Seed {settings.seed}.",
        "",
        *unfinished,
        *_table_lines([columns, *(_texts(recipe, row, rows) for row in rows)]),
        "",
        _legend(recipe),
        "",
        *(f"- {note}" for note in notes(recipe, settings, rows)),
    ]
    if recipe.figure is not None:
        lines += ["", f"![{recipe.summary}](figure.svg)"]
    for name, row, _, caption in _pictures(rows):
        lines += ["", f"## {_title(row)}", "", f"![{_title(row)}]({name})", "", caption]
    return "\n".join(lines) + "\n"


def _table_lines(texts: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in texts]
    return [lines[0], "|" + "---|" * len(texts[0]), *lines[1:]]


def _results_json(recipe: Recipe, settings: Settings, rows: Sequence[Row], *, complete: bool) -> bytes:
    """Every number but the times. No clock, host or path: two runs of one seed compare equal."""
    effort = {name: value for name, value in vars(settings).items() if name not in WHERE}
    return json_text.as_json(
        {
            "format": "fedprism-recipe/1",
            "recipe": recipe.name,
            "citation": recipe.citation,
            "complete": complete,
            "settings": effort,
            "notes": notes(recipe, settings, rows),
            "rows": [
                {
                    "cell": row.cell,
                    "entries": {name: _plain(entry) for name, entry in row.entries.items() if name not in TIMED},
                }
                for row in rows
            ],
            "versions": json_text.versions(),
        }
    )


def _plain(entry: Entry) -> object:
    if not isinstance(entry, Measured):
        return entry
    return {
        "mean": {metric: entry.mean(metric) for metric in entry.values},
        "batches": entry.values,
        **({"details": entry.details} if entry.details else {}),
        "statuses": list(dict.fromkeys(entry.statuses)),
        "settings": entry.settings,
    }


def _run_json(settings: Settings, rows: Sequence[Row], seconds: float) -> bytes:
    """How long it took, and on what."""
    place = devices.pick(settings.device)
    return json_text.as_json(
        {
            "seconds": seconds,
            "machine": {
                "system": platform.platform(),
                "processor": platform.machine(),
                "threads": torch.get_num_threads(),
                "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
            },
            "rows": [
                {
                    "cell": row.cell,
                    **{name: row.entries[name] for name in TIMED if name in row.entries},
                    "seconds a batch": {
                        name: entry.seconds for name, entry in row.entries.items() if isinstance(entry, Measured)
                    },
                }
                for row in rows
            ],
        }
    )


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys([key for row in rows for key in row.cell] + [key for row in rows for key in row.entries]))


def _texts(recipe: Recipe, row: Row, rows: Sequence[Row]) -> list[str]:
    entries = {column: _text(recipe, entry) for column, entry in row.entries.items()}
    everything = {**{key: str(value) for key, value in row.cell.items()}, **entries}
    return [everything.get(column, ABSENT) for column in _columns(rows)]


def _text(recipe: Recipe, entry: Entry) -> str:
    if isinstance(entry, Measured):
        answered = entry.mean("answered")
        partial = [f"{answered:.0%} answered"] if answered < 1 else []
        seconds = f"{entry.seconds_a_batch:{'.2g' if entry.seconds_a_batch < 10 else '.0f'}} s"
        return ", ".join([*(_number(metric, entry.mean(metric)) for metric in recipe.shown), *partial, seconds])
    if isinstance(entry, float):
        return f"{entry:.4g}"
    return ABSENT if entry is None else str(entry)


def _number(metric: str, value: float) -> str:
    if math.isnan(value):
        return ABSENT
    return _FORMATS.get(metric, "{:.3f}").format(value)


def _legend(recipe: Recipe) -> str:
    return f"What was measured: {', '.join(recipe.shown)}, seconds a batch; {ABSENT}: not to be had."


def _title(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.cell.items())


def _pictures(rows: Sequence[Row]) -> Iterator[tuple[str, Row, Tensor, str]]:
    """The file's name, the row, the picture and its caption, of rows that have one."""
    for number, row in enumerate(rows, start=1):
        picture, caption = (row.picture, row.caption) if row.picture is not None else contact_sheet(row.entries)
        if picture is not None:
            words = "-".join(str(value) for value in row.cell.values()).lower()
            yield f"recipe-{number:02}-{re.sub('[^a-z0-9.]+', '-', words).strip('-')}.png", row, picture, caption
