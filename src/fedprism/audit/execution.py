"""Runs the cells of a plan, anywhere, and picks up where an earlier run was stopped."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedprism.audit.exports import export
from fedprism.audit.fallbacks import fallbacks
from fedprism.audit.gates import Checks, Conclusion
from fedprism.audit.grid import Cell, Grid, lay_out
from fedprism.audit.materials import Setup
from fedprism.audit.results import FORMAT, PLAN, RESULTS, RUN, WORDS, Audit, load_audit
from fedprism.audit.summary import Summary, summarised
from fedprism.audit.system import weights_of
from fedprism.audit.trials import trial_of
from fedprism.errors import BadInput
from fedprism.experiments import Outcome, ResultStore, run_trials
from fedprism.experiments.store import read_json
from fedprism.files import json_text
from fedprism.files.lock import locked
from fedprism.files.tensors import write_bytes
from fedprism.runtime.executors import Executor

FREE = ("limits", "title")
"""What may change before an audit is resumed: a cell that was given up may get more time."""
PATHS = (*(("data", key) for key in ("folder", "npz", "csv", "texts", "tokenizer")), ("model", "weights"))


@dataclass(frozen=True, kw_only=True)
class AuditProgress:
    """How far an audit is. `earlier` cells were finished by a run before this one."""

    done: int
    total: int
    earlier: int
    outcome: Outcome | None = None


Listener = Callable[[AuditProgress], None]


def run_audit(
    setup: Setup,
    folder: str | Path,
    *,
    resume: bool = False,
    executor: Executor | None = None,
    device: str | None = None,
    checks: Checks | None = None,
    listen: Listener = lambda progress: None,
    grid: Grid | None = None,
) -> Audit:
    """Run every cell that has no record yet, then write the results.

    Each finished cell is on disk before the next outcome is looked at, so that a kill loses only what was running. With
    `resume` the cells of an earlier run are kept; those that failed are tried again. Where every attack of an automatic
    choice refuses, the one that they recommend is tried as well.
    """
    grid = grid or lay_out(setup)
    store = ResultStore(Path(folder))
    with locked(store.root):
        _begin(store, setup, resume)
        run = partial(_run_cells, setup, store, executor, device, listen)
        run(grid.cells, before=0)
        further = fallbacks(setup, grid.cells, lambda cell: store.get(cell.key))
        if further:
            run(further, before=len(grid.cells))
            grid = replace(grid, cells=(*grid.cells, *further))
        _conclude(store, setup, grid, checks or Checks())
    return load_audit(store.root)


def _run_cells(
    setup: Setup,
    store: ResultStore,
    executor: Executor | None,
    device: str | None,
    listen: Listener,
    cells: Sequence[Cell],
    *,
    before: int,
) -> None:
    """Run the cells that have no record yet; so many cells were there before them."""
    left = [cell for cell in cells if not store.finished(cell.key)]
    done, total = before + len(cells) - len(left), before + len(cells)
    earlier = done
    listen(AuditProgress(done=done, total=total, earlier=earlier))
    trials = [trial_of(setup, cell) for cell in left]
    for outcome in run_trials(trials, store, executor, device=device):
        done += 1
        listen(AuditProgress(done=done, total=total, earlier=earlier, outcome=outcome))


def _begin(store: ResultStore, setup: Setup, resume: bool) -> None:
    """A new folder, or an old one of the same plan."""
    about = {
        "format": FORMAT,
        "plan": setup.plan.as_json(),
        "fingerprint": setup.fingerprint(),
        "versions": json_text.versions(),
    }
    if not (store.root / PLAN).is_file():
        store.prepare()
        _put(store, PLAN, json_text.as_json(about))
        return
    if not resume:
        raise BadInput(
            f"'{store.root}' already holds an audit. Finish it with --resume, or choose another folder with -o."
        )
    differing = [
        key
        for key in _differences(read_json(store.root / PLAN), json.loads(json_text.as_json(about)))
        if not key.startswith(FREE)
    ]
    if differing:
        raise BadInput(
            f"the plan changed since '{store.root}' was started: {' and '.join(differing[:3])}. Restore "
            "it, or choose another folder with -o."
        )
    store.prepare()


def _put(store: ResultStore, name: str, content: bytes) -> None:
    """Write a file beside the records."""
    with store.writing():
        write_bytes(store.root / name, content)


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Names of the keys that differ, as deep as tables go."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
        return [name for key in keys for name in _differences(before.get(key), now.get(key), f"{path}.{key}")]
    return [path.removeprefix(".").removeprefix("plan.")] if before != now else []


def _conclude(store: ResultStore, setup: Setup, grid: Grid, checks: Checks) -> None:
    """results.json and what is made from it: the one place where gates are judged. Records are read one at a time."""
    rows = summarised(store.get(cell.key) for cell in grid.cells)
    conclusion = checks.concluded(rows, weights_of(setup))
    for name, content in export(setup.plan, rows, grid.skipped, conclusion).items():
        _put(store, name, content)
    words = setup.materials().words
    if words and setup.plan.scores.pictures != 0:
        _put(store, WORDS, json_text.as_json({str(token): word for token, word in words.items()}))
    _write_run(store, grid)
    _write_results(store, setup, grid, rows, conclusion)


def _write_results(
    store: ResultStore, setup: Setup, grid: Grid, rows: Sequence[Summary], conclusion: Conclusion
) -> None:
    head = {
        "format": FORMAT,
        "plan": _without_paths(setup.plan.as_json()),
        "fingerprint": setup.fingerprint(),
        "versions": json_text.versions(),
        "columns": _columns(setup),
        "skipped": [vars(each) for each in grid.skipped],
        "conclusion": conclusion.as_dict(),
        "summary": [row.as_dict() for row in rows],
    }
    with store.writing():
        handle, neighbour = tempfile.mkstemp(dir=store.root, prefix=f".{RESULTS}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json_text.as_json(head).rstrip().removesuffix(b"}").rstrip() + b',\n "records": [\n')
                for number, cell in enumerate(grid.cells):
                    record = store.record_path(cell.key).read_bytes().rstrip()
                    file.write((b",\n" if number else b"") + record)
                file.write(b"\n]\n}\n")
            os.chmod(neighbour, 0o644)
            os.replace(neighbour, store.root / RESULTS)
        except BaseException:
            Path(neighbour).unlink(missing_ok=True)
            raise


def _columns(setup: Setup) -> list[dict[str, Any]] | None:
    """How rows of a table are read, where some were kept."""
    columns = setup.materials().columns
    return None if columns is None or setup.plan.scores.pictures == 0 else [vars(column) for column in columns]


def _write_run(store: ResultStore, grid: Grid) -> None:
    clocks = {cell.key: store.clock(cell.key) for cell in grid.cells}
    seconds = {name: round(clock.seconds, 3) for name, clock in clocks.items()}
    factors = {name: clock.time_factor for name, clock in clocks.items() if clock.time_factor is not None}
    shares = {name: clock.memory_share for name, clock in clocks.items() if clock.memory_share < 1}
    about = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "platform": platform.platform(),
        "folder": str(store.root.absolute()),
        "seconds": seconds,
        "time_factors": factors,
        "memory_shares": shares,
    }
    _put(store, RUN, json_text.as_json(about))


def _without_paths(plan: dict[str, Any]) -> dict[str, Any]:
    """Paths by their last name: where a user's files lie is nobody's business."""
    public = json.loads(json.dumps(plan))
    for section, key in PATHS:
        if public.get(section) and public[section].get(key):
            public[section][key] = Path(public[section][key]).name
    if public.get("captures"):
        for key in ("folders", "truths"):
            public["captures"][key] = [Path(path).name for path in public["captures"][key]]
    return public  # type: ignore[no-any-return]
