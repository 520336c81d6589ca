"""The report of an audit, for a person who has a minute: one self-contained HTML file.

path = report.write("results")
path = report.write_comparison("before", "after")
"""

from __future__ import annotations

from pathlib import Path

from fedprism.audit import Setup, load_audit
from fedprism.errors import BadInput
from fedprism.files import publishing
from fedprism.report import protocol
from fedprism.report.comparing import render_comparison
from fedprism.report.gallery import keeps_pictures
from fedprism.report.page import render

__all__ = ["conclude", "render", "render_comparison", "write", "write_comparison"]

REPORT, COMPARISON = "report.html", "comparison.html"


def write(folder: str | Path, *, show_images: bool | None = None, output: str | Path | None = None) -> Path:
    """Write the report of the audit in a folder, beside its results unless `output` says where.

    Private samples are shown where the plan's data set has a public name, elsewhere only with `show_images`.
    """
    audit = load_audit(folder)
    if show_images and not keeps_pictures(audit.plan):
        raise BadInput(
            "This audit kept no samples to show. Add pictures = 8 under [scores] of its plan and run it again."
        )
    return _published(render(audit, show_images=show_images), output, Path(folder) / REPORT)


def write_comparison(before: str | Path, after: str | Path, *, output: str | Path | None = None) -> Path:
    """Write what changed between two audits, beside the results of the second unless `output` says where."""
    page = render_comparison(load_audit(before), load_audit(after))
    return _published(page, output, Path(after) / COMPARISON)


def conclude(setup: Setup, folder: Path, *, show_images: bool | None = None) -> Path:
    """What `fedprism audit` does at its end: keep what its captures show about their protocol, write the report."""
    captures = setup.plan.captures
    protocol.keep(folder, [setup.base / name for name in captures.folders] if captures is not None else ())
    return write(folder, show_images=show_images)


def _published(page: str, output: str | Path | None, default: Path) -> Path:
    path = default if output is None else Path(output)
    publishing.require_writable(path.parent)
    publishing.publish(path.parent, {path.name: page.encode()})
    return path
