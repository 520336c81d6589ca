"""What `fedprism attack` does; the command line only reads the flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor

from fedprism import captures, runner
from fedprism.attacks import ATTACKS, Attack, Reduction, flags
from fedprism.attacks import then as combined
from fedprism.checks import row
from fedprism.display.html import png
from fedprism.errors import BadInput
from fedprism.evaluation import scoring
from fedprism.evaluation.residuals import least, residuals
from fedprism.files import json_text, pictures, publishing
from fedprism.inputs import by_name
from fedprism.metrics import METRICS
from fedprism.models import factory
from fedprism.types import Observation, Reconstruction, Record

if TYPE_CHECKING:
    from rich.table import Table


MOST_NAMED = 8
"""Clients that are named; more are counted."""


def carry_out(
    capture: Sequence[str],
    name: str,
    then: str | None,
    *,
    siblings: Sequence[str],
    model: str | None,
    truth: str | None,
    metrics: Sequence[str],
    allow_download: bool,
    output: Path,
    seed: int,
    device: str | None,
) -> tuple[dict[str, Any], list[Table | str]]:
    """Attack a capture, write what came of it, and return the record and its text for a person.

    `capture` holds the folder and settings of the attack as flags; `siblings` are flags of the command itself. `then`:
    the attack on what `name` splits off.
    """
    publishing.require_writable(output)
    attack, folders = flags.apply(capture, _named(name, then), siblings=siblings)
    if len(folders) != 1:
        raise BadInput(f"give one capture folder, not {' and '.join(folders) or 'none'}.")
    observation = captures.load(folders[0], model=factory.from_factory(model) if model else None)
    known = scoring.load_truth(truth, observation) if truth else None
    for word in metrics:  # before a long computation, not after it
        row(METRICS, word, "metric")
    missing = sorted(attack.needs - observation.granted())
    if missing:
        untold = " and ".join(f"'{field}'" for field in missing)
        raise BadInput(
            f"{name} needs to know {untold}, which the capture does not hold. Write it under knowledge in "
            "capture.json, or name the model with --model."
        )
    answer = runner.run(attack, observation, seed=seed, device=device)
    scores = None
    if known is not None and answer.inputs is not None:
        scores = scoring.score(answer, known, metrics=metrics, allow_download=allow_download)
    updates = residuals(observation, answer)
    record = Record(
        kind="attack",
        run={
            **{"attack": name, "settings": repr(attack), "source": observation.source},
            **({"then": then} if then else {}),
            **({"owners": answer.owners} if answer.owners else {}),
        },
        knowledge_used=tuple(sorted(answer.knowledge_used)),
        scores=dataclasses.asdict(scores) if scores else None,
        residual=least(updates),
        updates=tuple(map(dataclasses.asdict, updates)),
        status=str(answer.status),
        seed=seed,
        versions=json_text.versions(),
    )
    files = result_files(observation, answer, record)
    publishing.publish(output, files, stale=("record.json", "recovered-*.png", "update-*.safetensors"))
    return dataclasses.asdict(record), [summary(record, files), *([str(scores)] if scores else [])]


def _named(name: str, then: str | None) -> Attack:
    """The attack by its name, with the one behind it if there is one."""
    attack = row(ATTACKS, name, "attack")()
    if then is None:
        return attack
    if not isinstance(attack, Reduction):
        raise BadInput(f"{name} does not split updates, so --then has nothing to attack. Use --attack disaggregation.")
    return combined(attack, row(ATTACKS, then, "attack")())


def result_files(observation: Observation, reconstruction: Reconstruction, record: Record) -> dict[str, bytes]:
    """The files of one attack: tensors, updates by their number, a picture a recovered image and, last, the record."""
    tensors = {
        **(by_name(reconstruction.inputs) if reconstruction.inputs is not None else {}),
        "labels": reconstruction.labels,
        "properties": reconstruction.properties,
    }
    images = pictures.as_pixels(observation, reconstruction) if pictures.shows_images(reconstruction) else ()
    return {
        "reconstruction.safetensors": _saved(tensors),
        **{f"update-{k}.safetensors": _saved(update) for k, update in enumerate(reconstruction.updates or ())},
        **{f"recovered-{number}.png": png(picture) for number, picture in enumerate(images)},
        "record.json": json_text.as_json(dataclasses.asdict(record)),
    }


def _saved(tensors: Mapping[str, Tensor | None]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None})


def _reproduced(updates: Sequence[Mapping[str, Any]]) -> str:
    """How many updates the samples read off them reproduce, and whose."""
    recovered = [each for each in updates if each["recovered"]]
    names = list(dict.fromkeys(each["client"] for each in recovered if each["client"] is not None))
    listed = ", ".join([*names[:MOST_NAMED], *([f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else [])])
    return f"{len(recovered)} of {len(updates)}{f': {listed}' if listed else ''}"


def summary(record: Record, files: Mapping[str, bytes]) -> Table:
    """What a person wants to know first about an attack that has run."""
    from rich import box  # slow to import, and few who read or write results draw tables
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    explained = "unknown" if record.residual is None else f"{record.residual:.3g} (0 = update fully explained)"
    table.add_row("attack", str(record.run["settings"]))
    table.add_row("status", record.status)
    table.add_row("residual", explained)
    if len(record.updates) > 1:
        table.add_row("updates reproduced", _reproduced(record.updates))
    table.add_row("images", str(sum(name.endswith(".png") for name in files)))
    updates = sum(name.startswith("update-") for name in files)
    if updates:
        table.add_row("updates", str(updates))
    table.add_row("knowledge used", ", ".join(record.knowledge_used))
    return table
