"""The facts of a recorded run: each round as the server saw it, beside the tensors. They lie in `findings.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fedprism.captures.schema import MOST_MANIFEST_BYTES, Size
from fedprism.errors import BadCapture
from fedprism.files.strict import Strict

FORMAT = "fedprism-findings/1"
FILE = "findings.json"
MOST_NAME = 1000
"""Characters of a client's name or of a reason, a bound on what a hostile client may have stored."""
MOST_METRIC = 200
"""Characters of the name or the value of a metric that are kept."""

Name = Annotated[str, Field(max_length=MOST_NAME)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Value = int | Number | bool | Name | None


class CentralNoise(Strict):
    """Central differential privacy as the server is set up for it: noise of multiplier * norm / clients on the mean.

    Or of multiplier * norm / sqrt(clients) on each update, before a plain mean.
    """

    clipped_by: Literal["server", "client"]
    clipping_norm: Amount
    noise_multiplier: Amount
    clients: Size
    """How many the noise is scaled for."""
    added_to: Literal["mean", "updates"] = "mean"


class Leakage(Strict):
    """What cheap checks got out of one round; None where a check does not apply."""

    samples: Number | None = None
    """Largest fraction of the samples behind an update that dense inversion recovers."""
    client: Name | None = None
    """Whose update that is, where it is one client's and any was recovered."""
    labels: Number | None = None
    """Largest fraction of the labels behind an update that follow from its signs."""
    norm: Number | None = None
    """Largest length of an update."""
    serious: int = 0
    """How many serious findings there are on the model that was sent."""


class RoundFacts(Strict):
    """One round as the server saw it, beside the tensors."""

    index: int
    protocol: Literal["plain", "secagg+"]
    sampled: tuple[Name, ...]
    replied: tuple[Name, ...] = ()
    model: Name | None = None
    """The file of the capture that holds the model which was sent."""
    examples: Mapping[Name, Size] = {}
    metrics: Mapping[Name, Mapping[Name, Value]] = {}
    norms: Mapping[Name, Amount] = {}
    """Length of each client's update, where the server saw it."""
    problems: Mapping[Name, Name] = {}
    """Clients whose answer was not recorded, and why."""
    masks_repeat: bool = False
    """Whether the masks of secure aggregation come out of fewer seeds than they seem to."""
    noise: CentralNoise | None = None
    leakage: Leakage | None = None
    uplink: Literal["weights", "difference", "gradient"] = "weights"
    """What clients sent back, as it was stated or recognised."""
    passed_by: Mapping[Name, Size] = {}
    """Records of arrays beside the model that were not recorded, and of how many tensors."""
    unsent: Annotated[int, Field(ge=0)] = 0
    """How many parameters of the recorder's model the model that was sent does not hold."""
    left_out: Name | None = None
    """Why none of this round's updates is in the capture, though clients answered."""


class FindingEntry(Strict):
    check: Name
    severity: Literal["note", "serious"]
    sentence: Name
    evidence: Mapping[Name, Number] = {}


class FindingsFile(Strict):
    format: Literal["fedprism-findings/1"]
    rounds: tuple[RoundFacts, ...]
    findings: tuple[FindingEntry, ...]
    troubles: tuple[Name, ...] = ()
    """What the recorder could not do, once each."""


def read_facts(folder: str | os.PathLike[str]) -> tuple[RoundFacts, ...] | None:
    """The rounds of a recorded run as the server saw them; None where they were not written down."""
    read = read_file(folder)
    return None if read is None else read.rounds


def read_file(folder: str | os.PathLike[str]) -> FindingsFile | None:
    """The facts of a recorded run with what the recorder could not do; None where they were not written down."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            text = file.read(MOST_MANIFEST_BYTES + 1)
        if len(text) > MOST_MANIFEST_BYTES:
            raise ValueError(f"more than {MOST_MANIFEST_BYTES} bytes")
        return FindingsFile.model_validate_json(text)
    except (ValidationError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadCapture(f"{FILE} beside the capture is not a file of {FORMAT} ({reason}). Remove it.") from error


def plain_metrics(values: Mapping[str, Any]) -> dict[str, Value]:
    """Metrics as JSON can hold them: numbers and short words; of anything else only that it was there."""
    kept: dict[str, Value] = {}
    for name, value in values.items():
        finite = not isinstance(value, float) or value - value == 0
        short = isinstance(value, int | float | str) and finite and len(str(value)) <= MOST_METRIC
        kept[str(name)[:MOST_METRIC]] = value if short else None
    return kept
