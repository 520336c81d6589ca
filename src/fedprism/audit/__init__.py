"""The audit: from a plan to records that say what leaks, to whom, and what a defense changes.

fp.audit(model, data, defenses=[...])  # this module can be called: `report.auditing.audit`, without a plan

setup = audit.prepare("plan.toml")
audit.run_audit(setup, "results")
for outcome in audit.load_audit("results"):
    print(outcome.state, outcome.description, outcome.record)
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedprism.audit.execution import AuditProgress, run_audit
from fedprism.audit.gates import Checks, Conclusion, Gate, parse_gate
from fedprism.audit.grid import Grid, lay_out
from fedprism.audit.materials import Setup, plan_folder
from fedprism.audit.plan import Plan, checked_plan, load_plan, parse_plan
from fedprism.audit.results import Audit, load_audit

__all__ = [
    "Audit",
    "AuditProgress",
    "Checks",
    "Conclusion",
    "Gate",
    "Grid",
    "Plan",
    "Setup",
    "checked_plan",
    "lay_out",
    "load_audit",
    "load_plan",
    "parse_gate",
    "parse_plan",
    "prepare",
    "run_audit",
]


def prepare(
    plan: str | os.PathLike[str] | Plan,
    *,
    data_dir: Path | None = None,
    base: str | os.PathLike[str] | None = None,
    allow_download: bool = False,
) -> Setup:
    """A plan, or the file of one, ready to be run. Paths in it start at `base`: else at the file's folder.

    `allow_download` lets LPIPS fetch its network; data and models are never fetched.
    """
    if isinstance(plan, Plan):
        return Setup(plan, Path(base or "."), data_dir, allow_download)
    return Setup(load_plan(plan), Path(base) if base is not None else plan_folder(plan), data_dir, allow_download)


class _CallableRoom(ModuleType):
    """`fp.audit` is this room and, called, the function that runs a whole audit and writes its report.

    That function is in a room below this one, which it needs; it is looked up when it is called.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _whole_audit()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_whole_audit())


def _whole_audit() -> Any:
    return importlib.import_module("fedprism.report.auditing").audit


sys.modules[__name__].__class__ = _CallableRoom
