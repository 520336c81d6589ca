"""Runs the cells of a plan, anywhere, and picks up where an earlier run was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedprism import results
from fedprism.audit.cell import Finished, failed, run_cell
from fedprism.audit.exports import export
from fedprism.audit.folder import FORMAT, RESULTS, RUN, Audit, AuditFolder, load_audit
from fedprism.audit.gates import Gate, judged
from fedprism.audit.grid import Cell, Grid, lay_out
from fedprism.audit.materials import Setup
from fedprism.audit.summary import Row, summarised
from fedprism.errors import BadInput, about_memory
from fedprism.executing import Executor, Failure, Processes, RayCluster, Serial

FREE = ("limits", "title")
"""What may change before an audit is resumed: a cell that was given up may get more time."""
LEAST_SHARE = 1 / 64
"""Of the usual amount at a time: what still needs more memory than there is, fails."""
PATHS = (("data", "folder"), ("data", "npz"), ("data", "csv"), ("model", "weights"))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an audit is. `earlier` cells were finished by a run before this one."""

    done: int
    total: int
    earlier: int
    cell: Finished | None = None


Listener = Callable[[Progress], None]


def run_audit(
    setup: Setup,
    folder: str | Path,
    *,
    resume: bool = False,
    executor: Executor | None = None,
    device: str | None = None,
    gates: Sequence[Gate] = (),
    listen: Listener = lambda progress: None,
    grid: Grid | None = None,
) -> Audit:
    """Run every cell that has no record yet, then write the results.

    Each finished cell is on disk before the next outcome is looked at, so that a kill loses only what was running. With
    `resume` the cells of an earlier run are kept; those that failed are tried again.
    """
    grid = grid or lay_out(setup)
    files = AuditFolder(Path(folder))
    with _alone(files.root):
        _begin(files, setup, resume)
        kept = {cell.id for cell in grid.cells if _is_finished(files, cell)}
        left = [cell for cell in grid.cells if cell.id not in kept]
        done = len(kept)
        listen(Progress(done=done, total=len(grid.cells), earlier=len(kept)))
        for outcome in _outcomes(setup, left, executor or Serial(), device):
            files.write(outcome)
            done += 1
            listen(Progress(done=done, total=len(grid.cells), earlier=len(kept), cell=outcome))
        _conclude(files, setup, grid, gates)
    return load_audit(files.root)


def _is_finished(files: AuditFolder, cell: Cell) -> bool:
    """A record that cannot be read, after a power cut perhaps, is as good as none."""
    try:
        return files.has(cell.id) and files.read(cell.id).outcome != "failed"
    except BadInput:
        return False


def _outcomes(setup: Setup, cells: Sequence[Cell], executor: Executor, device: str | None) -> Iterator[Finished]:
    """Every cell's outcome.

    What ran out of memory beside other cells gets another chance with all of it, so that the number of workers plays no
    part in the numbers. What runs out of it alone works on half as much at a time, and on half of that.
    """
    left, share = list(cells), 1.0
    if _shares_memory(executor) and len(left) > 1:
        again: list[Cell] = []
        for index, outcome in executor.run(partial(run_cell, setup, device, share=share), left):
            found = _settled(left[index], outcome)
            if _short_of_memory(found):
                again.append(left[index])
            else:
                yield found
        left = again
    while left:
        again = []
        for index, outcome in _one_by_one(executor, partial(run_cell, setup, device, share=share), left):
            found = _settled(left[index], outcome)
            if found.divisible and share > LEAST_SHARE:
                again.append(left[index])
            else:
                yield found
        left, share = again, share / 2


def _shares_memory(executor: Executor) -> bool:
    return isinstance(executor, RayCluster) or (isinstance(executor, Processes) and executor.workers != 1)


def _one_by_one(
    executor: Executor, function: Callable[[Cell], Finished], cells: Sequence[Cell]
) -> Iterator[tuple[int, Finished | Failure]]:
    """Outcomes of cells of which no two run at a time."""
    if isinstance(executor, RayCluster):
        for index, cell in enumerate(cells):
            yield from ((index, outcome) for _, outcome in executor.run(function, [cell]))
        return
    yield from (replace(executor, workers=1) if isinstance(executor, Processes) else executor).run(function, cells)


def _settled(cell: Cell, outcome: Finished | Failure) -> Finished:
    """A process that was killed may have asked for too much: then nobody knows whether it can do with less."""
    if isinstance(outcome, Failure):
        return failed(cell, outcome.reason, divisible=about_memory(outcome.reason))
    return outcome


def _short_of_memory(found: Finished) -> bool:
    """Or killed, which is what a machine does to a process that asks for too much."""
    return found.outcome == "failed" and about_memory(found.reason)


def _begin(files: AuditFolder, setup: Setup, resume: bool) -> None:
    """A new folder, or an old one of the same plan."""
    about = {
        "format": FORMAT,
        "plan": setup.plan.as_json(),
        "fingerprint": setup.fingerprint(),
        "versions": results.versions(),
    }
    if not files.begun:
        files.begin(about)
        return
    if not resume:
        raise BadInput(
            f"expected a folder without an audit, found one in '{files.root}'; add --resume to finish it, or choose "
            "another folder with -o."
        )
    differing = [
        key for key in _differences(files.about(), json.loads(results.as_json(about))) if not key.startswith(FREE)
    ]
    if differing:
        raise BadInput(
            f"expected the plan that '{files.root}' was begun with, found that {' and '.join(differing[:3])} "
            "changed; restore it, or choose another folder with -o."
        )
    files.clear_remains()


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Names of the keys that differ, as deep as tables go."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
        return [name for key in keys for name in _differences(before.get(key), now.get(key), f"{path}.{key}")]
    return [path.removeprefix(".").removeprefix("plan.")] if before != now else []


def _conclude(files: AuditFolder, setup: Setup, grid: Grid, gates: Sequence[Gate]) -> None:
    """results.json and what is made from it. Records are read one at a time."""
    rows = summarised(files.read(cell.id) for cell in grid.cells)
    files.put(export(setup.plan.title, rows, setup.plan.scores.metrics, grid.skipped, gates))
    _write_run(files, grid)
    _write_results(files, setup, grid, rows, gates)


def _write_results(files: AuditFolder, setup: Setup, grid: Grid, rows: Sequence[Row], gates: Sequence[Gate]) -> None:
    head = {
        "format": FORMAT,
        "plan": _without_paths(setup.plan.as_json()),
        "versions": results.versions(),
        "columns": _columns(setup),
        "skipped": [vars(each) for each in grid.skipped],
        "gates": [judgement.as_dict() for judgement in judged(rows, gates)],
        "summary": [row.as_dict() for row in rows],
    }
    with files._writing():
        handle, neighbour = tempfile.mkstemp(dir=files.root, prefix=f".{RESULTS}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(results.as_json(head).rstrip().removesuffix(b"}").rstrip() + b',\n "records": [\n')
                for number, cell in enumerate(grid.cells):
                    record = (files.root / "records" / f"{cell.id}.json").read_bytes().rstrip()
                    file.write((b",\n" if number else b"") + record)
                file.write(b"\n]\n}\n")
            os.chmod(neighbour, 0o644)
            os.replace(neighbour, files.root / RESULTS)
        except BaseException:
            Path(neighbour).unlink(missing_ok=True)
            raise


def _columns(setup: Setup) -> list[dict[str, Any]] | None:
    """How rows of a table are read, where some were kept."""
    columns = setup.materials().columns
    return None if columns is None or setup.plan.scores.pictures == 0 else [vars(column) for column in columns]


def _write_run(files: AuditFolder, grid: Grid) -> None:
    clocks = {cell.id: files.clock(cell.id) for cell in grid.cells}
    seconds = {name: round(clock.seconds, 3) for name, clock in clocks.items()}
    factors = {name: clock.time_factor for name, clock in clocks.items() if clock.time_factor is not None}
    shares = {name: clock.share for name, clock in clocks.items() if clock.share < 1}
    about = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "platform": platform.platform(),
        "folder": str(files.root.absolute()),
        "seconds": seconds,
        "time_factors": factors,
        "memory_shares": shares,
    }
    files.put({RUN: results.as_json(about)})


def _without_paths(plan: dict[str, Any]) -> dict[str, Any]:
    """Paths by their last name: where a user's files lie is nobody's business."""
    found = json.loads(json.dumps(plan))
    for section, key in PATHS:
        if found.get(section) and found[section].get(key):
            found[section][key] = Path(found[section][key]).name
    if found.get("captures"):
        for key in ("folders", "truths"):
            found["captures"][key] = [Path(path).name for path in found["captures"][key]]
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Two audits in one folder would overwrite each other. The lock goes with the process, however it ends."""
    results.require_writable(root)
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / ".lock", "w")  # noqa: SIM115 (closed below, after what it protects)
    except OSError as error:
        raise BadInput(
            f"expected a folder to write to, found that '{root}' cannot be written ({error.strerror or error}); "
            "make room there or choose another one with -o."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise BadInput(f"expected '{root}' for this audit alone, found another at work there; wait for it.") from error
    try:
        yield
    finally:
        lock.close()
