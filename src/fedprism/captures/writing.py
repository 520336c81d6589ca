"""Writes captures: `fedprism.captures.save`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedprism import losses
from fedprism.captures.schema import (
    FORMAT,
    KNOWLEDGE_FILE,
    LOCAL_FIELDS,
    MANIFEST,
    PLAIN_FIELDS,
    TENSOR_FIELDS,
    TRAPDOOR_FILE,
    UPDATE_FIELDS,
    parse,
)
from fedprism.checks import shown
from fedprism.defenses import COUNT_RELEASES, DEFENSES, CountRelease, Defense
from fedprism.errors import BadInput
from fedprism.files.tensors import write_bytes, write_tensors
from fedprism.inputs import InputTypes, by_name
from fedprism.models import spec_of
from fedprism.optimizers import name_of
from fedprism.types import Knowledge, Observation, Round, Update


def save(observation: Observation, folder: str | os.PathLike[str]) -> Path:
    """Write an observation as a new capture; the folder appears only when everything is written."""
    target = new_folder(folder)
    files: dict[str, Update] = {}
    manifest = manifest_of(observation, files)
    # Beside the first folder that exists: on the same disk, and no folder is left behind where writing fails.
    existing = next(parent for parent in target.parents if parent.exists())
    try:
        staging = Path(tempfile.mkdtemp(dir=existing, prefix=".fedprism-"))
        try:
            for name, tensors in files.items():
                write_tensors(staging / name, tensors)
            write_bytes(staging / MANIFEST, manifest)
            os.chmod(staging, 0o755)
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.rename(target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise BadInput(
            f"the capture {shown(target.name)} cannot be written: {error.strerror}. Choose another place."
        ) from error
    return Path(folder)


def new_folder(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a capture that does not exist yet."""
    target = Path(folder).absolute()
    if os.path.lexists(target):
        raise BadInput(f"{shown(target.name)} already exists. Choose another name.")
    return target


def manifest_of(observation: Observation, files: dict[str, Update]) -> bytes:
    """The text of capture.json; the tensors that belong beside it are added to `files`, by file name."""
    described = {
        "format": FORMAT,
        "model": _model_entry(observation.model),
        "knowledge": _knowledge_entry(observation.knowledge, files),
        "rounds": _round_entries(observation.rounds, files),
        "source": observation.source,
    }
    if observation.trapdoor is not None:
        files[TRAPDOOR_FILE] = observation.trapdoor
    try:
        text = json.dumps(described, indent=1).encode()
    except TypeError as error:
        raise BadInput(f"JSON cannot hold this knowledge: {error}. Withhold it.") from error
    parse(text)  # what is written can be read
    return text


def _model_entry(model: nn.Module | None) -> dict[str, Any]:
    spec = spec_of(model) if model is not None else None
    entry: dict[str, Any] = {"name": spec.name, "kwargs": dict(spec.kwargs)} if spec else {"name": None}
    if model is not None and not model.training:
        entry["training"] = False
    return entry


def _knowledge_entry(knowledge: Knowledge, files: dict[str, Update]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        name: getattr(knowledge, name)
        for name in (*PLAIN_FIELDS, *LOCAL_FIELDS)
        if getattr(knowledge, name) is not None
    }
    if knowledge.input_types is not None:
        entry["input_types"] = _type_names(knowledge.input_types)
    if knowledge.loss is not None:
        entry["loss"] = losses.name_of(knowledge.loss)
        if entry["loss"] is None:
            raise BadInput(
                f"a capture can name only the losses {', '.join(losses.LOSSES)}, not a function. Withhold the "
                "loss or use one of these."
            )
    if knowledge.defense is not None:
        entry["defense"] = [_defense_entry(part) for part in knowledge.defense.members]
    if knowledge.local_optimizer is not None:
        kwargs = dataclasses.asdict(knowledge.local_optimizer)  # type: ignore[call-overload]
        entry["local_optimizer"] = {"name": name_of(knowledge.local_optimizer), "kwargs": kwargs}
    if knowledge.count_release is not None:
        entry["count_release"] = _count_entry(knowledge.count_release)
    if tensors := _knowledge_tensors(knowledge):
        files[KNOWLEDGE_FILE] = tensors
    return entry


def _type_names(types: InputTypes) -> Any:
    """The types as JSON holds them."""
    if isinstance(types, dict):
        return {name: _type_names(each) for name, each in types.items()}
    return [_type_names(each) for each in types] if isinstance(types, tuple) else str(types).removeprefix("torch.")


def _defense_entry(defense: Defense) -> dict[str, Any]:
    name = next((name for name, known in DEFENSES.items() if known is type(defense)), None)
    if name is None:
        raise BadInput(
            f"a capture can name only the defenses {', '.join(DEFENSES)}, not {shown(defense)}. Withhold the defense."
        )
    return {"name": name, "kwargs": dataclasses.asdict(defense)}  # type: ignore[call-overload]


def _count_entry(release: CountRelease) -> dict[str, Any]:
    name = next((name for name, known in COUNT_RELEASES.items() if known is type(release)), None)
    if name is None:
        raise BadInput(
            f"a capture can name only the releases of counts {', '.join(COUNT_RELEASES)}, not "
            f"{shown(release)}. Withhold it."
        )
    return {"name": name, "kwargs": dataclasses.asdict(release)}


def _knowledge_tensors(knowledge: Knowledge) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {
        name: getattr(knowledge, name) for name in TENSOR_FIELDS if getattr(knowledge, name) is not None
    }
    if isinstance(knowledge.labels, tuple):
        tensors.update({f"labels.{number}": labels for number, labels in enumerate(knowledge.labels)})
    elif knowledge.labels is not None:
        tensors["labels"] = knowledge.labels
    for name in UPDATE_FIELDS:
        value = getattr(knowledge, name) or {}
        fields = {f"{name}[{number}]": update for number, update in enumerate(value)}
        for field, update in (fields if isinstance(value, tuple) else {name: value}).items():
            tensors.update({f"{field}.{key}": tensor for key, tensor in update.items()})
    if knowledge.public_data is not None:
        tensors.update(by_name(knowledge.public_data.inputs, "public_data.inputs"))
        tensors["public_data.labels"] = knowledge.public_data.labels
    return tensors


def _round_entries(rounds: tuple[Round, ...], files: dict[str, Update]) -> list[dict[str, Any]]:
    names: dict[int, str] = {}  # one file for each mapping of tensors, however many rounds refer to it

    def file_of(name: str, tensors: Update) -> str:
        if id(tensors) not in names:
            names[id(tensors)] = name
            files[name] = tensors
        return names[id(tensors)]

    return [round_entry(round_, number, lambda _, *file: file_of(*file)) for number, round_ in enumerate(rounds)]


def round_entry(round_: Round, number: int, file_of: Callable[[str, str, Update], str]) -> dict[str, Any]:
    """What the manifest says of a round. `file_of(field, name, tensors)` gives the file that holds the tensors."""
    entry = {name: getattr(round_, name) for name in ("index", "kind", "reduction", "clients")}
    for name in ("participants", "examples"):
        if getattr(round_, name) is not None:
            entry[name] = list(getattr(round_, name))
    for name in ("params", "update", "buffers_before", "buffers_after"):
        if getattr(round_, name) is not None:
            file = f"{name.replace('_', '-')}-{number}.safetensors"
            entry[name] = file_of(name, file, getattr(round_, name))
    return entry
