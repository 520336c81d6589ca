"""What `fedprism audit` and `fedprism init` do; the command line only reads the flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedprism import report
from fedprism.audit import (
    Audit,
    Checks,
    Setup,
    by_defense,
    estimate,
    exports,
    lay_out,
    prepare,
    proposing,
    run_audit,
)
from fedprism.audit.execution import AuditProgress, Listener
from fedprism.audit.grid import Grid, configurations
from fedprism.audit.summary import summarised, title
from fedprism.cli.terminal import PRINTING, answer, console_for
from fedprism.errors import BadInput
from fedprism.evaluation.severity import TOKENS
from fedprism.files import publishing
from fedprism.naming import counted
from fedprism.runtime import devices
from fedprism.runtime.executors import Executor, Processes, RayCluster

MOST_LISTED = 40
"""Configurations that --dry-run lists before it counts the rest."""
LOCAL = "local"
MOST_A_GPU = 8
"""Cells that share a GPU in a local Ray."""


def carry_out(
    path: Path,
    output: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    checks: Callable[[Sequence[str]], Checks] = lambda metrics: Checks(),
    dry_run: bool = False,
    data_dir: Path | None = None,
    allow_download: bool = False,
    device: str | None = None,
) -> int:
    """Audit a plan and return the exit code. `checks` makes them for the plan's metrics."""
    if workers is not None and ray is not None:
        raise BadInput("--workers and --ray exclude each other. Leave one out.")
    setup = prepare(path, data_dir=data_dir, allow_download=allow_download)
    if ray is not None and setup.plan.limits.seconds is not None:
        raise BadInput("--ray ignores limits.seconds, which the plan sets. Use --workers, or remove limits.seconds.")
    metrics = setup.plan.scores.metrics
    wanted = checks([*metrics, "columns", *TOKENS])
    place = _place(device, elsewhere=ray not in (None, LOCAL) and not dry_run)
    if not dry_run:
        publishing.require_writable(output)
    grid = lay_out(setup)
    setup.require_metrics()
    if dry_run:
        priced = estimate.estimate(setup, grid, device)
        answer(_grid_as_dict(grid, priced), lambda: _grid_lines(grid, priced))
        return 0
    executor = _executor(setup, grid, workers, ray, place)
    with _bar(console_for(stderr=True)) as listen:
        finished = run_audit(
            setup, output, resume=resume, executor=executor, device=device, checks=wanted, listen=listen, grid=grid
        )
    page = report.conclude(setup, output)
    result = {**finished.conclusion, "report": str(page), "results": str(output / "results.json")}
    answer(result, lambda: _ending(finished, metrics, page))
    return int(finished.conclusion["exit_code"])


def _ending(finished: Audit, metrics: Sequence[str], page: Path) -> Iterator[Table | str]:
    """The verdict, what each defense prevents and costs, and where the report is; in full every configuration."""
    rows = summarised(finished)
    if PRINTING.verbose:
        yield exports.table(rows, metrics)
    yield from finished.conclusion["sentences"]
    yield by_defense.table(by_defense.by_defense(rows))
    failed = sum(row.failed for row in rows)
    if PRINTING.verbose or failed:
        yield from (f"- {title(row.cell)}: {reason}" for row in rows for reason in row.reasons)
    yield f"Report: {page}"


def write_plan(path: Path, model: str | None, data: str | None, loss: str | None) -> None:
    """Write a commented plan; an existing file is left alone."""
    if path.exists():
        raise BadInput(f"'{path}' already exists. Choose another name with -o.")
    publishing.require_writable(path.parent)
    # Published in one step: a full disk must not leave an empty plan, which the next `init` would not replace.
    publishing.publish(path.parent, {path.name: proposing.proposed(model, data, path.parent, loss).encode()})
    said = f"{path} is a plan with every key explained. Next: fedprism audit {path} --dry-run"
    answer({"plan": str(path)}, lambda: [said])


def _place(device: str | None, *, elsewhere: bool) -> torch.device:
    "The device of the runs. Machines of a cluster have GPUs of their own, whatever this one has."
    if elsewhere and device is not None:
        return torch.device("cuda" if device.startswith("cuda") else "cpu")
    return devices.pick(device)


def _executor(setup: Setup, grid: Grid, workers: int | None, ray: str | None, place: torch.device) -> Executor:
    """Always processes of their own: a run that crashes, or is killed, is then one failed record.

    A cluster of other machines, of whose GPUs nothing is known, gives each run a whole one.
    """
    if ray == LOCAL:
        gpus = 1 / estimate.workers_that_fit(setup, grid, MOST_A_GPU, place) if place.type == "cuda" else 0.0
        return RayCluster(gpus=gpus)
    if ray is not None:
        return RayCluster(address=ray, gpus=1.0 if place.type == "cuda" else 0.0)
    fitting = estimate.workers_that_fit(setup, grid, workers or 1, place)
    return Processes(workers=fitting, timeout=setup.plan.limits.seconds)


def _grid_as_dict(grid: Grid, priced: estimate.Estimate) -> dict[str, Any]:
    return {
        "runs": len(grid.cells),
        "configurations": [
            {"title": title(cell), "seeds": len(members)} for cell, members in configurations(grid.cells)
        ],
        "not_tested": [{"what": each.what, "why": each.why} for each in grid.skipped],
        "cannot_run": [{"runs": count, "why": reason} for count, reason in priced.refused],
        "estimate": str(priced),
    }


def _grid_lines(grid: Grid, priced: estimate.Estimate) -> Iterator[str]:
    listed = list(configurations(grid.cells))
    most = len(listed) if PRINTING.verbose else MOST_LISTED
    yield from (f"{len(members):>4} x  {title(cell)}" for cell, members in listed[:most])
    if len(listed) > most:
        yield f"        and {counted(len(listed) - most, 'further configuration')}; -v lists all"
    yield from (f"not tested: {each.what}: {each.why}" for each in grid.skipped)
    yield from (f"{count:>4} x  cannot run: {reason}" for count, reason in priced.refused)
    yield f"{counted(len(grid.cells), 'run')}, {priced}"


@contextmanager
def _bar(console: Console) -> Iterator[Listener]:
    """A bar with the time left on a terminal, elsewhere a line every tenth of the way."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=None)

        def listen(progress: AuditProgress) -> None:
            if progress.outcome is None:  # cells of an earlier run say nothing about how fast this one is
                bar.reset(task, total=progress.total - progress.earlier)
            bar.update(task, completed=progress.done - progress.earlier)

        yield listen


def _lines(console: Console) -> Listener:
    last = -1

    def listen(progress: AuditProgress) -> None:
        nonlocal last
        tenth = 10 * progress.done // max(progress.total, 1)
        if tenth > last and progress.outcome is not None:
            last = tenth
            console.print(f"{progress.done} of {counted(progress.total, 'run')}")

    return listen
