"""An inspection as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses

from rich import box
from rich.table import Table

from fedprism.checks import shown
from fedprism.files import json_text
from fedprism.inspection.base import Inspection

FORMAT = "fedprism-inspection/1"
MOST_ROWS = 100
"""Findings in the table; further ones are counted."""


def table(inspection: Inspection) -> Table:
    """One row a finding, the serious ones first. Names come from the file: control characters are written out."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("severity", "check", "tensor", "finding"):
        drawn.add_column(column, overflow="fold", no_wrap=column == "severity")
    for finding in inspection.findings[:MOST_ROWS]:
        name = shown(finding.tensor) if finding.tensor else "the whole model"
        drawn.add_row(finding.severity.value, finding.check, name, finding.sentence)
    return drawn


def summary(inspection: Inspection) -> str:
    """The answer in one sentence."""
    more = len(inspection.findings) - MOST_ROWS
    left_out = f" The table leaves {more} out; --json lists all." if more > 0 else ""
    if inspection.serious:
        return f"{len(inspection.serious)} serious findings: do not train on this model.{left_out}"
    return f"Nothing serious was found; that does not prove that the model is honest.{left_out}"


def as_json(inspection: Inspection) -> str:
    """All findings with their evidence."""
    content = {
        "format": FORMAT,
        "serious": len(inspection.serious),
        "findings": [dataclasses.asdict(finding) for finding in inspection.findings],
    }
    return json_text.as_json(content).decode().rstrip()
