"""The audit behind `Recorder.report`: one capture, the user's own model and loss, in this process."""

from __future__ import annotations

import logging
import webbrowser
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from fedprism import report
from fedprism.audit import Setup, checked_plan, run_audit
from fedprism.captures.schema import MANIFEST
from fedprism.errors import BadInput
from fedprism.files.publishing import require_writable
from fedprism.integrations.findings import load_findings
from fedprism.runtime.executors import Serial
from fedprism.types import LossFn

log = logging.getLogger("fedprism")

PICTURES = 8
"""Recovered samples that a cell keeps if the user wants to see them."""


def audited(
    capture: Path,
    output: Path | None,
    *,
    model: nn.Module | None,
    loss: LossFn | None,
    attacks: Collection[str] | None,
    most_updates: int | None,
    pictures: bool,
    open_page: bool,
) -> Path:
    """The page of an audit of this capture."""
    if not (capture / MANIFEST).is_file():
        said = "; ".join(finding.sentence for finding in load_findings(capture)) or "no client answered"
        raise BadInput(f"'{capture.name}' holds no recorded updates ({said}). Record another run.")
    grid: dict[str, Any] = {"seeds": [0], **({"attacks": list(attacks)} if attacks is not None else {})}
    chosen = {} if most_updates is None else {"most_updates": most_updates}
    plan = checked_plan(
        {
            "title": f"What the recorded run '{capture.name}' gives away",
            "captures": {"folders": [capture.name], **chosen},
            "grid": grid,
            "scores": {"pictures": PICTURES if pictures else 0},
        }
    )
    folder = output or _free(capture)
    require_writable(folder)
    setup = Setup(plan, capture.parent, model=model, loss=loss)
    # Serial: processes of its own would start the user's program again, which need not be guarded against that.
    run_audit(setup, folder, executor=Serial())
    page = report.conclude(setup, folder, show_images=pictures or None)
    log.warning("the report: %s", page)
    if open_page:
        webbrowser.open(page.resolve().as_uri())
    return page


def _free(capture: Path) -> Path:
    """A folder beside the capture that is not there yet."""
    names = (f"{capture.name}-report{'' if number == 1 else f'-{number}'}" for number in count(1))
    return next(folder for name in names if not (folder := capture.with_name(name)).exists())
