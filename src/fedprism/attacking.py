"""What `fedprism attack` does; the command line only reads the flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedprism import factory, flags, io, results, running, scoring
from fedprism.attacks import ATTACKS, fitted
from fedprism.checks import row
from fedprism.errors import BadInput
from fedprism.explaining import unexplained
from fedprism.metrics import METRICS
from fedprism.types import Record

if TYPE_CHECKING:
    from rich.table import Table


def carry_out(
    capture: Sequence[str],
    name: str,
    *,
    siblings: Sequence[str],
    model: str | None,
    truth: str | None,
    metrics: Sequence[str],
    allow_download: bool,
    output: Path,
    seed: int,
    device: str | None,
) -> list[Table | str]:
    """Attack a capture, write what came of it, and return what is printed.

    `capture` holds the folder and settings of the attack as flags; `siblings` are flags of the command itself.
    """
    results.require_writable(output)
    chosen, folders = flags.apply(capture, row(ATTACKS, name, "method of attack")(), siblings=siblings)
    if len(folders) != 1:
        raise BadInput(f"expected one capture folder, found {' and '.join(folders) or 'none'}; name one.")
    observation = io.load(folders[0], model=factory.from_factory(model) if model else None)
    known = scoring.load_truth(truth) if truth else None
    for word in metrics:  # before a long computation, not after it
        row(METRICS, word, "metric")
    attack = fitted(chosen, observation)
    missing = sorted(attack.needs - observation.granted())
    if missing:
        untold = " and ".join(f"'{field}'" for field in missing)
        raise BadInput(
            f"{name} needs to know {untold}, which the capture does not tell; write it under knowledge in "
            "capture.json, or name the model with --model."
        )
    found = running.run(attack, observation, seed=seed, device=device)
    scores = None
    if known is not None and found.inputs is not None:
        scores = scoring.score(found, known, metrics=metrics, allow_download=allow_download)
    record = Record(
        kind="attack",
        cell={
            **{"attack": name, "settings": repr(chosen), "source": observation.source},
            **({"owners": found.owners} if found.owners else {}),
        },
        knowledge_used=tuple(sorted(found.knowledge_used)),
        scores=dataclasses.asdict(scores) if scores else None,
        residual=unexplained(attack, observation, found),
        status=str(found.status),
        seed=seed,
        versions=results.versions(),
    )
    files = results.attack_files(observation, found, record)
    results.publish(output, files, stale=("record.json", "recovered-*.png", "update-*.safetensors"))
    return [results.summary(record, files), *([str(scores)] if scores else [])]
