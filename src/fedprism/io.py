"""Captures on disk, `fedprism-capture/1`: a folder with capture.json beside safetensors files.

A capture is hostile until checked. Nothing in it is unpickled, imported or executed; a model is built only by a name
from the table, and only once the tensors on disk have the shapes that such a model has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.checks import row, shown
from fedprism.defenses import DEFENSES, Chain, Defense, chain
from fedprism.errors import BadCapture, BadInput
from fedprism.models import build, spec_of
from fedprism.schema import FORMAT, CaptureFile, DefenseEntry, RoundEntry, parse
from fedprism.tensors import TensorFile, write_bytes, write_tensors
from fedprism.types import Batch, Knowledge, Observation, Round, Update, is_soft

MANIFEST = "capture.json"
MOST_MANIFEST_BYTES = 64 * 2**20

_PLAIN = ("input_shape", "bounds", "normalization", "batch_size", "examples")
_LOCAL = ("local_lr", "local_epochs", "local_batch_size", "local_momentum")
_TENSORS = ("labels", "windows", "counts", "participation", "cohort_sizes")
_UPDATES = ("batchnorm_exact", "batchnorm_running", "mixing")


def save(observation: Observation, folder: str | os.PathLike[str]) -> Path:
    """Write an observation as a new capture; the folder appears only when everything is written."""
    target = Path(folder)
    if target.exists():
        raise BadInput(
            f"expected a new folder for the capture, found that '{target.name}' exists; choose another name."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        manifest = {
            "format": FORMAT,
            "model": _model_entry(observation.model),
            "knowledge": _write_knowledge(observation.knowledge, staging),
            "rounds": _write_rounds(observation.rounds, staging),
            "source": observation.source,
        }
        if observation.trapdoor is not None:
            write_tensors(staging / "trapdoor.safetensors", observation.trapdoor)
        write_bytes(staging / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
        os.chmod(staging, 0o755)
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def load(folder: str | os.PathLike[str], *, model: nn.Module | None = None) -> Observation:
    """Read and check a capture. `model` stands in for captures that name none, and overrules one that is named."""
    root = Path(folder)
    manifest = root / MANIFEST
    if not manifest.is_file():
        raise BadCapture(
            f"expected a folder with a {MANIFEST}, found none in '{root.name}'; point at a capture folder."
        )
    if manifest.stat().st_size > MOST_MANIFEST_BYTES:
        raise BadCapture(
            f"expected a {MANIFEST} of at most {MOST_MANIFEST_BYTES} bytes, found more; split the capture."
        )
    described = parse(manifest.read_bytes())
    files: dict[str, TensorFile] = {}
    if model is None and described.model.name is not None:
        model = _build_model(described, root, files)
    rounds = tuple(_read_round(entry, position, root, files, model) for position, entry in enumerate(described.rounds))
    trapdoor = root / "trapdoor.safetensors"
    return Observation(
        model=model.train(described.model.training) if model is not None else None,
        rounds=rounds,
        knowledge=_read_knowledge(described, root, files, model),
        trapdoor=dict(_open("trapdoor.safetensors", root, files)) if trapdoor.exists() else None,
        source=described.source,
    )


# --- writing ---------------------------------------------------------------------------------------------------------


def _model_entry(model: nn.Module | None) -> dict[str, Any]:
    spec = spec_of(model) if model is not None else None
    entry: dict[str, Any] = {"name": spec.name, "kwargs": dict(spec.kwargs)} if spec else {"name": None}
    if model is not None and not model.training:
        entry["training"] = False
    return entry


def _write_knowledge(knowledge: Knowledge, folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {
        name: getattr(knowledge, name) for name in (*_PLAIN, *_LOCAL) if getattr(knowledge, name) is not None
    }
    if knowledge.loss is not None:
        entry["loss"] = losses.name_of(knowledge.loss)
        if entry["loss"] is None:
            raise BadInput(
                f"expected a loss out of {', '.join(losses.LOSSES)} to write a capture, found a function of its own; "
                "withhold the loss or use one of these."
            )
    if knowledge.defense is not None:
        entry["defense"] = [_defense_entry(part) for part in _parts(knowledge.defense)]
    tensors: dict[str, Tensor] = {}
    for name in _TENSORS:
        value = getattr(knowledge, name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None:  # labels, one tensor a round
            tensors.update({f"{name}.{number}": part for number, part in enumerate(value)})
    for name in _UPDATES:
        tensors.update({f"{name}.{key}": tensor for key, tensor in (getattr(knowledge, name) or {}).items()})
    if knowledge.public_data is not None:
        tensors["public_data.inputs"] = knowledge.public_data.inputs
        tensors["public_data.labels"] = knowledge.public_data.labels
    if tensors:
        write_tensors(folder / "knowledge.safetensors", tensors)
    return entry


def _parts(defense: Defense) -> tuple[Defense, ...]:
    return defense.defenses if isinstance(defense, Chain) else (defense,)


def _defense_entry(defense: Defense) -> dict[str, Any]:
    name = next((name for name, known in DEFENSES.items() if known is type(defense)), None)
    if name is None:
        raise BadInput(
            f"expected a defense out of {', '.join(DEFENSES)} to write a capture, found {defense!r}; withhold the defense."
        )
    return {"name": name, "kwargs": dataclasses.asdict(defense)}  # type: ignore[call-overload]


def _write_rounds(rounds: tuple[Round, ...], folder: Path) -> list[dict[str, Any]]:
    names: dict[int, str] = {}  # rounds that share a tensor mapping share its file

    def written(update: Update, stem: str) -> str:
        if id(update) not in names:
            names[id(update)] = f"{stem}.safetensors"
            write_tensors(folder / names[id(update)], update)
        return names[id(update)]

    entries = []
    for number, seen in enumerate(rounds):
        entry: dict[str, Any] = {
            "index": seen.index,
            "kind": seen.kind,
            "reduction": seen.reduction,
            "clients": seen.clients,
            "params": written(seen.params, f"params-{number}"),
            "update": written(seen.update, f"update-{number}"),
        }
        for name in ("participants", "examples"):
            if getattr(seen, name) is not None:
                entry[name] = list(getattr(seen, name))
        for name in ("buffers_before", "buffers_after"):
            if getattr(seen, name) is not None:
                entry[name] = written(getattr(seen, name), f"{name.replace('_', '-')}-{number}")
        entries.append(entry)
    return entries


# --- reading ---------------------------------------------------------------------------------------------------------


def _open(name: str, root: Path, files: dict[str, TensorFile]) -> TensorFile:
    """A tensor file of the capture, opened and checked once; its path may not leave the folder."""
    if name not in files:
        try:
            path = (root / name).resolve()
            inside = path.is_relative_to(root.resolve()) and not Path(name).is_absolute()
            regular = inside and path.is_file()
        except (OSError, ValueError, RuntimeError):  # names with NUL bytes, too long names, loops of links
            inside = regular = False
        if not regular:
            problem = "no such file" if inside else "a path that leaves the folder"
            raise BadCapture(f"expected a file inside the capture, found {problem} at {shown(name)}; correct the name.")
        opened = TensorFile(path)
        opened.check_finite()
        files[name] = opened
    return files[name]


def _build_model(described: CaptureFile, root: Path, files: dict[str, TensorFile]) -> nn.Module:
    """The named model, once the parameters on disk are seen to be of that model's shapes: sizes are then bounded."""
    name, kwargs = described.model.name or "", described.model.kwargs
    if "seed" in kwargs:
        raise BadCapture("expected only the model's own settings in model.kwargs, found 'seed'; remove it.")
    try:
        with torch.device("meta"):
            outline = build(name, **kwargs)
        _check_params(_open(described.rounds[0].params, root, files), outline)
        return build(name, **kwargs)
    except BadInput as error:
        raise BadCapture(f"in the capture's model: {error}") from error


def _check_params(params: TensorFile, model: nn.Module) -> None:
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    optional = {name: tuple(b.shape) for name, b in model.named_buffers()}
    for name, shape in wanted.items():
        if name not in params:
            raise BadCapture(
                f"expected parameter '{name}' of the model in '{params.path.name}', found none; "
                "give the model that was trained."
            )
        _check_tensor(params, name, shape)
        if not params.dtype(name).is_floating_point:
            raise BadCapture(
                f"expected floating-point parameters, found {params.dtype(name)} for '{name}'; convert it."
            )
    for name in params:
        if name not in wanted and name not in optional:
            raise BadCapture(
                f"expected only the model's parameters and buffers in '{params.path.name}', found {shown(name)}; "
                "give the model that was trained."
            )
        if name in optional:
            _check_tensor(params, name, optional[name])


def _check_tensor(file: TensorFile, name: str, shape: tuple[int, ...]) -> None:
    if file.shape(name) != shape:
        raise BadCapture(
            f"expected shape {shape} for '{name}' in '{file.path.name}', found {file.shape(name)}; "
            "give the model that was trained, or record the round again."
        )


def _read_round(
    entry: RoundEntry, position: int, root: Path, files: dict[str, TensorFile], model: nn.Module | None
) -> Round:
    params, update = _open(entry.params, root, files), _open(entry.update, root, files)
    if model is not None:
        _check_params(params, model)
    if len(update) == 0:
        raise BadCapture(f"expected at least one tensor in '{update.path.name}', found none; record the round again.")
    for name in update:
        if name not in params:
            raise BadCapture(
                f"expected the update's tensors to be named as the parameters, found {shown(name)} in "
                f"'{update.path.name}' and not in '{params.path.name}'; record the round again."
            )
        _check_tensor(update, name, params.shape(name))
    for name in ("participants", "examples"):
        given = getattr(entry, name)
        if given is not None and len(given) != entry.clients:
            raise BadCapture(
                f"expected as many {name} as clients in round {position}, found {len(given)} and {entry.clients}; "
                "correct one of them."
            )
    buffers_before = _open(entry.buffers_before, root, files) if entry.buffers_before else None
    buffers_after = _open(entry.buffers_after, root, files) if entry.buffers_after else None
    own_params, own_update, found_buffers = _split_buffers(params, update, model)
    return Round(
        index=position if entry.index is None else entry.index,
        params=own_params,
        update=own_update,
        kind=entry.kind,
        reduction=entry.reduction,
        clients=entry.clients,
        participants=entry.participants,
        examples=entry.examples,
        buffers_before=_checked_buffers(buffers_before, model) or found_buffers,
        buffers_after=_checked_buffers(buffers_after, model),
    )


def _split_buffers(
    params: TensorFile, update: TensorFile, model: nn.Module | None
) -> tuple[Update, Update, Update | None]:
    """Separate parameters from buffers where software recorded whole state dicts."""
    buffers = {name for name, _ in model.named_buffers()} if model is not None else set()
    found = {name: params[name] for name in params if name in buffers}
    if not found and not any(name in buffers for name in update):
        return params, update, None
    own_params = {name: params[name] for name in params if name not in buffers}
    own_update = {name: update[name] for name in update if name not in buffers}
    if not own_update:
        raise BadCapture(
            f"expected updates of parameters in '{update.path.name}', found only buffers; record the round again."
        )
    return own_params, own_update, found or None


def _checked_buffers(file: TensorFile | None, model: nn.Module | None) -> Update | None:
    if file is None:
        return None
    if model is not None:
        shapes = {name: tuple(b.shape) for name, b in model.named_buffers()}
        for name in file:
            if name not in shapes:
                raise BadCapture(
                    f"expected the model's buffers in '{file.path.name}', found {shown(name)}; record the round again."
                )
            _check_tensor(file, name, shapes[name])
    return file


def _read_knowledge(
    described: CaptureFile, root: Path, files: dict[str, TensorFile], model: nn.Module | None
) -> Knowledge:
    entry = described.knowledge
    values: dict[str, Any] = {name: getattr(entry, name) for name in (*_PLAIN, *_LOCAL)}
    if entry.loss is not None:
        row(losses.LOSSES, entry.loss, "loss")
        values["loss"] = entry.loss
    if entry.defense is not None:
        parts = entry.defense if isinstance(entry.defense, tuple) else (entry.defense,)
        values["defense"] = chain(*map(_read_defense, parts))
    if entry.normalization is not None:
        channels = entry.input_shape[0] if entry.input_shape else None
        if {len(part) for part in entry.normalization} != {channels}:
            raise BadCapture(
                f"expected a mean and a std for each of {channels} channels in knowledge.normalization, found "
                f"{len(entry.normalization[0])} and {len(entry.normalization[1])}; correct it."
            )
    if (root / "knowledge.safetensors").exists():
        values.update(_tensor_knowledge(_open("knowledge.safetensors", root, files)))
    knowledge = Knowledge(**values)
    _check_consistent(knowledge, model)
    return knowledge


def _read_defense(entry: DefenseEntry) -> Defense:
    kind = row(DEFENSES, entry.name, "defense")
    try:
        return kind(**entry.kwargs)
    except (TypeError, ValueError) as error:
        raise BadCapture(
            f"expected settings of the defense {entry.name}, found {shown(entry.kwargs)}; correct knowledge.defense."
        ) from error


def _tensor_knowledge(file: TensorFile) -> dict[str, Any]:
    values: dict[str, Any] = {}
    numbered: dict[int, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for key in file:
        field, _, rest = key.partition(".")
        if key in _TENSORS:
            values[key] = file[key]
        elif field == "labels" and rest.isdecimal() and len(rest) < 8:
            numbered[int(rest)] = file[key]
        elif rest and field in (*_UPDATES, "public_data"):
            groups.setdefault(field, {})[rest] = file[key]
        else:
            raise BadCapture(
                f"expected knowledge fields in '{file.path.name}', found {shown(key)}; remove or rename it."
            )
    if numbered:
        values["labels"] = tuple(numbered[number] for number in sorted(numbered))
    public = groups.pop("public_data", None)
    if public is not None:
        if set(public) != {"inputs", "labels"}:
            raise BadCapture("expected public_data.inputs and public_data.labels, found another set; write both.")
        values["public_data"] = Batch(public["inputs"], public["labels"])
    return {**values, **groups}


def _check_consistent(knowledge: Knowledge, model: nn.Module | None) -> None:
    labels = knowledge.labels if isinstance(knowledge.labels, tuple) else (knowledge.labels,)
    for part in labels:
        if part is None:
            continue
        if not is_soft(part) and not (part.dtype == torch.int64 and part.dim() == 1 and bool((part >= 0).all())):
            raise BadCapture(
                f"expected labels as class numbers (int64, one dimension) or soft rows, found {part.dtype} of shape "
                f"{tuple(part.shape)}; convert them."
            )
        if isinstance(knowledge.batch_size, int) and len(part) != knowledge.batch_size:
            raise BadCapture(
                f"expected {knowledge.batch_size} labels, as batch_size says, found {len(part)}; correct one of them."
            )
