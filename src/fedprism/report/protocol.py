"""What recordings show about their protocol, kept beside an audit of them, so that its report can say it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fedprism.errors import BadInput, FedprismError
from fedprism.files import json_text, publishing
from fedprism.integrations.findings import load_findings

FILE = "findings.json"
FORMAT = "fedprism-audit-findings/1"
MOST_BYTES = 2**24
"""A larger file of findings is not read."""


class ProtocolFinding(BaseModel):
    """Something that holds in a recorded run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capture: str
    check: str
    severity: Literal["note", "serious"]
    sentence: str


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["fedprism-audit-findings/1"]
    findings: tuple[ProtocolFinding, ...]


def keep(folder: Path, captures: Iterable[Path]) -> None:
    """Write down what holds in these captures; nothing where nothing does. A damaged file is told, not fatal."""
    findings = []
    for place, capture in enumerate(captures, 1):
        name = f"{place}: {capture.resolve().name}"
        try:
            read = load_findings(capture)
        except FedprismError as error:
            findings.append({"capture": name, "check": "unreadable", "severity": "note", "sentence": str(error)})
            continue
        findings += [
            {"capture": name, "check": each.check, "severity": each.severity.value, "sentence": each.sentence}
            for each in read
        ]
    if findings:
        publishing.publish(folder, {FILE: json_text.as_json({"format": FORMAT, "findings": findings})})


def load_kept(folder: Path) -> tuple[ProtocolFinding, ...]:
    """The findings beside an audit, the serious ones first; none where it has no such file."""
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("too large")
        read = _File.model_validate(json.loads(path.read_bytes())).findings
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise BadInput(f"{FILE} is not a file of {FORMAT}. Remove it, or run the audit again.") from error
    return tuple(sorted(read, key=lambda each: each.severity != "serious"))


def headline(findings: Iterable[ProtocolFinding]) -> tuple[str, ...]:
    """For the verdict: what is serious about the protocol, each thing once."""
    serious = dict.fromkeys(each.sentence for each in findings if each.severity == "serious")
    return tuple(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in serious)
