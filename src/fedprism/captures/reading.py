"""Reads and checks captures. Nothing in one is unpickled, imported or executed.

A named model is built only once the tensors on disk have its shapes, so that memory is asked for by what is there.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.captures.layout import Layout, check_names, check_tensor, with_unsent
from fedprism.captures.schema import (
    KNOWLEDGE_FILE,
    LOCAL_FIELDS,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    PLAIN_FIELDS,
    ROUND_FIELDS,
    TENSOR_FIELDS,
    TRAPDOOR_FILE,
    UPDATE_FIELDS,
    DefenseEntry,
    KnowledgeEntry,
    ModelEntry,
    OptimizerEntry,
    RoundEntry,
    parse,
)
from fedprism.checks import row, shown
from fedprism.defenses import COUNT_RELEASES, DEFENSES, CountRelease, Defense, chain
from fedprism.defenses.mixup import Told
from fedprism.errors import BadCapture, BadInput
from fedprism.files.tensors import Selection, TensorFile
from fedprism.inputs import (
    are_floating,
    arguments,
    blank_inputs,
    by_name,
    from_names,
    shape_of,
    tensors_of,
    types_of,
)
from fedprism.models import build
from fedprism.optimizers import OPTIMIZERS, LocalOptimizer
from fedprism.types import Batch, Knowledge, Observation, Round, Update, is_soft

T = TypeVar("T")
GROUPED_FIELDS = ("labels", "public_data", *UPDATE_FIELDS)
"""Knowledge of several tensors, written as `field.part`."""

ABOUT_EACH_UPDATE = ("batch_size", "labels", "batchnorm_exact")
"""Knowledge with an entry for each update, where there are several."""
ABOUT_ALL_ROUNDS = ("participation", "windows", "counts", "cohort_sizes", "mixing")
"""Knowledge that says something only about all rounds together."""
MOST_CLASSES = 2**31
"""Classes that labels may speak of where nobody knows how many there are."""


def load(
    folder: str | os.PathLike[str], *, model: nn.Module | None = None, updates: Sequence[int] | None = None
) -> Observation:
    """Read and check a capture. `model` stands in for captures that name none, and overrules one that is named.

    updates: only these, by their places from 0 on; files of the others are not opened.
    """
    capture = _Folder(Path(folder))
    described = parse(capture.manifest())
    named = described.model or ModelEntry()
    try:
        outline = model if model is not None else _outline(named)
        layout = Layout.of(outline, weights_known=model is not None)
        every = len(described.rounds)
        places = range(every) if updates is None else updates
        rounds = tuple(_read_round(described.rounds[place], place, capture, layout) for place in places)
        classes = _classes(outline, described.knowledge) if model is None else None
        entries = None if described.of_aggregates else every
        knowledge = _read_knowledge(described.knowledge, capture, entries, classes)
        if knowledge.mixing is not None:
            Told.of(knowledge.mixing, every)
        if updates is not None:
            knowledge = _about(knowledge, updates, every)
        trapdoor = capture.optional(TRAPDOOR_FILE)
        capture.check_finite()
        # A model that is handed in stays the caller's: its mode is not changed.
        built = copy.deepcopy(model) if model is not None else _built(named)
    except BadInput as error:
        raise BadCapture(f"in the capture, {error}") from error
    return Observation(
        model=built.train(named.training) if built is not None else None,
        rounds=rounds,
        knowledge=knowledge,
        trapdoor=dict(trapdoor) if trapdoor is not None else None,
        subject=_subject(rounds),
        source=described.source,
    )


class _Folder:
    """The files of a capture. Each is opened once, whatever it is called; none may lie outside the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # '.' has no name
        self._files: dict[Path, TensorFile] = {}
        self._known: dict[Hashable, Any] = {}

    def path(self, name: str) -> Path:
        """The regular file of this name inside the folder."""
        try:
            path = (self.root / name).resolve()
            inside = path.is_relative_to(self.root.resolve()) and not Path(name).is_absolute()
            problem = "" if inside and path.is_file() else "no such file" if inside else "the path leaves the folder"
        except (OSError, ValueError, RuntimeError):  # names with NUL bytes, too long names, loops of links
            problem = "not a valid name"
        if problem:
            raise BadCapture(f"capture {shown(self.root.name)} has no usable file {shown(name)}: {problem}.")
        return path

    def manifest(self) -> bytes:
        path = self.path(MANIFEST)
        try:
            with path.open("rb") as file:
                text = file.read(MOST_MANIFEST_BYTES + 1)
        except OSError as error:
            raise BadCapture(f"{MANIFEST} cannot be read: {error.strerror}.") from error
        if len(text) > MOST_MANIFEST_BYTES:
            raise BadCapture(f"{MANIFEST} is larger than {MOST_MANIFEST_BYTES} bytes. Split the capture.")
        return text

    def open(self, name: str) -> TensorFile:
        path = self.path(name)
        if path not in self._files:
            self._files[path] = TensorFile(path)
        return self._files[path]

    def optional(self, name: str) -> TensorFile | None:
        return self.open(name) if os.path.lexists(self.root / name) else None

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for this key, so that a file which many rounds share is looked at once."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def check_finite(self) -> None:
        """Last, because it reads the files through. Counts may be NaN where they are unknown."""
        for path, file in self._files.items():
            file.check_finite(nan_allowed=("counts",) if path.name == KNOWLEDGE_FILE else ())


# --- the model -------------------------------------------------------------------------------------------------------


def _outline(entry: ModelEntry) -> nn.Module | None:
    """The named model without memory for its parameters; None where none is named."""
    if "seed" in entry.kwargs:
        raise BadCapture("model.kwargs may hold only the model's own settings, not 'seed'. Remove it.")
    with torch.device("meta"):
        return _built(entry)


def _built(entry: ModelEntry) -> nn.Module | None:
    # The seed only keeps torch's global generator as it was: the parameters come with each round.
    return build(entry.name, seed=0, **entry.kwargs) if entry.name is not None else None


def _classes(outline: nn.Module | None, knowledge: KnowledgeEntry) -> int | None:
    """How many classes the named model tells apart, once it is seen to accept inputs of the stated shape."""
    if outline is None or knowledge.input_shape is None:
        return None
    try:
        like = torch.empty(0, device="meta")
        args, kwargs = arguments(blank_inputs(knowledge.input_shape, _types(knowledge.input_types), 1, like))
        outputs: Tensor = outline.eval()(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        raise BadCapture(
            f"the model does not accept input_shape {shown(knowledge.input_shape)}. Correct "
            "knowledge.input_shape or the model."
        ) from error
    return outputs.shape[-1]


# --- rounds ----------------------------------------------------------------------------------------------------------


def _read_round(entry: RoundEntry, position: int, capture: _Folder, layout: Layout | None) -> Round:
    params_file, update_file = (_named(capture.open(name), capture, layout) for name in (entry.params, entry.update))
    params, buffers = capture.once(("params", params_file.path), lambda: _read_params(params_file, layout))
    update, changes = capture.once(
        ("update", params_file.path, update_file.path), lambda: _read_update(update_file, params_file, layout)
    )
    before = _read_buffers(entry.buffers_before, capture, layout) or buffers
    after = _read_buffers(entry.buffers_after, capture, layout)
    if after is None and before is not None and changes is not None and entry.kind == "delta":
        after = {name: (before[name] + changes[name]).to(before[name].dtype) for name in changes if name in before}
    stated = {name: getattr(entry, name) for name in ("kind", "reduction", "clients", "participants", "examples")}
    index = position if entry.index is None else entry.index
    return Round(index=index, params=params, update=update, buffers_before=before, buffers_after=after, **stated)


def _named(file: TensorFile, capture: _Folder, layout: Layout | None) -> TensorFile:
    return file if layout is None else capture.once(("names", file.path), lambda: layout.name_places(file))


def _read_params(params: TensorFile, layout: Layout | None) -> tuple[Update, Update | None]:
    if layout is None:
        return params, None
    wanted = () if layout.weights_known else layout.params
    check_names(params, wanted, layout.all(), "the model's parameters and buffers")
    for name, like in layout.all().items():
        if name in params:
            check_tensor(params, name, tuple(like.shape), like.dtype)
    sent, buffers = _split(params, layout)
    return with_unsent(sent, layout.params), buffers


def _read_update(update: TensorFile, params: TensorFile, layout: Layout | None) -> tuple[Update, Update | None]:
    check_names(update, (), params, "tensors that the parameters have")
    for name in update:
        check_tensor(update, name, params.shape(name), params.dtype(name))
    trained, buffers = _split(update, layout)
    if not trained:
        raise BadCapture(f"{update.name} has no update of any parameter. Record the round again.")
    return trained, buffers


def _split(file: TensorFile, layout: Layout | None) -> tuple[Update, Update | None]:
    """Parameters and buffers, which software that records whole state dicts does not separate."""
    if layout is None or all(name in layout.params for name in file):
        return file, None
    buffers = Selection(file, (name for name in file if name in layout.buffers))
    return Selection(file, (name for name in file if name in layout.params)), buffers or None


def _read_buffers(name: str | None, capture: _Folder, layout: Layout | None) -> Update | None:
    if name is None:
        return None
    file = _named(capture.open(name), capture, layout)

    def check() -> TensorFile:
        if layout is not None:
            check_names(file, (), layout.buffers, "the model's buffers")
            for key in file:
                check_tensor(file, key, tuple(layout.buffers[key].shape), layout.buffers[key].dtype)
        return file

    return capture.once(("buffers", file.path), check)


def _subject(rounds: tuple[Round, ...]) -> str | None:
    """The participant, where all rounds are one and the same participant's."""
    names = rounds[0].participants or ()
    return names[0] if len(names) == 1 and all(round_.participants == names for round_ in rounds) else None


# --- knowledge -------------------------------------------------------------------------------------------------------


def stated_knowledge(values: Mapping[str, Any]) -> Knowledge:
    """Knowledge in the plain words of a capture, such as {"input_shape": [1, 28, 28], "loss": "cross_entropy"}."""
    try:
        entry = KnowledgeEntry.model_validate_json(json.dumps(dict(values)))
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(f"knowledge {shown(dict(values))} is not valid ({reason}).") from error
    return _plain_knowledge(entry)


def _plain_knowledge(entry: KnowledgeEntry) -> Knowledge:
    """What an entry tells in words and numbers."""
    values: dict[str, Any] = {name: getattr(entry, name) for name in (*PLAIN_FIELDS, *LOCAL_FIELDS)}
    values["input_types"] = _types(entry.input_types)
    if entry.loss is not None:
        row(losses.LOSSES, entry.loss, "loss")
        values["loss"] = entry.loss
    if entry.defense is not None:
        parts = entry.defense if isinstance(entry.defense, tuple) else (entry.defense,)
        values["defense"] = chain(*map(_read_defense, parts))
    if entry.local_optimizer is not None:
        values["local_optimizer"] = _read_optimizer(entry.local_optimizer)
    if entry.count_release is not None:
        values["count_release"] = _read_release(entry.count_release)
    return Knowledge(**values)


def _read_knowledge(entry: KnowledgeEntry, capture: _Folder, rounds: int | None, classes: int | None) -> Knowledge:
    """`rounds` is how many entries a tuple has that goes with the rounds; None where it goes with the clients."""
    values: dict[str, Any] = {}
    file = capture.optional(KNOWLEDGE_FILE)
    if file is not None:
        values.update(_read_tensors(file, rounds, entry.examples))
    labels = values.get("labels")
    if isinstance(labels, Tensor):
        _check_labels(labels, entry.batch_size if isinstance(entry.batch_size, int) else None, classes, entry.loss)
    elif labels is not None:
        sizes = entry.batch_size if rounds is not None else None
        each = sizes if isinstance(sizes, tuple) else [sizes] * len(labels)
        for part, size in zip(labels, each, strict=True):
            _check_labels(part, size, classes, entry.loss)
    public = values.get("public_data")
    if public is not None:
        _check_public(public, entry, classes)
    return dataclasses.replace(_plain_knowledge(entry), **values)


def _about(knowledge: Knowledge, places: Sequence[int], rounds: int) -> Knowledge:
    """What is known about some updates. What is known about all rounds together is left out."""
    chosen: dict[str, Any] = dict.fromkeys(ABOUT_ALL_ROUNDS)
    for name in ABOUT_EACH_UPDATE:
        value = getattr(knowledge, name)
        if isinstance(value, tuple) and len(value) == rounds:
            chosen[name] = tuple(value[place] for place in places) if len(places) > 1 else value[places[0]]
    return dataclasses.replace(knowledge, **chosen)


def _read_defense(entry: DefenseEntry) -> Defense:
    kind = row(DEFENSES, entry.name, "defense")
    try:
        return kind(**entry.kwargs)
    except (TypeError, ValueError) as error:
        raise BadCapture(
            f"the defense {entry.name} does not take the settings {shown(entry.kwargs)}. Correct knowledge.defense."
        ) from error


def _read_optimizer(entry: OptimizerEntry) -> LocalOptimizer:
    kind = row(OPTIMIZERS, entry.name, "local optimizer")
    try:
        return kind(**entry.kwargs)
    except TypeError as error:
        raise BadCapture(
            f"the local optimizer {entry.name} does not take the settings {shown(entry.kwargs)}. Correct "
            "knowledge.local_optimizer."
        ) from error


def _read_release(entry: DefenseEntry) -> CountRelease:
    kind = row(COUNT_RELEASES, entry.name, "release of counts")
    try:
        return kind(**entry.kwargs)
    except (TypeError, ValueError) as error:
        raise BadCapture(
            f"the release of counts {entry.name} does not take the settings {shown(entry.kwargs)}. "
            "Correct knowledge.count_release."
        ) from error


def _read_tensors(file: TensorFile, rounds: int | None, examples: tuple[int, ...] | None) -> dict[str, Any]:
    """The fields in the knowledge file: whole tensors, and mappings, sequences and batches as `field.part`."""
    values, groups = _grouped(file)
    if "labels" in groups:
        if "labels" in values:
            raise BadCapture(f"{file.name} holds 'labels' both whole and in parts. Remove one.")
        parts = groups.pop("labels")
        count = rounds if rounds is not None else len(parts) if examples is None else len(examples)
        values["labels"] = tuple(_exactly(file, "labels", parts, map(str, range(count))))
    if "public_data" in groups:
        values["public_data"] = _batch(file, groups.pop("public_data"))
    for field in ROUND_FIELDS:
        if any(name.startswith(f"{field}[") for name in groups):
            values[field] = _one_per_round(file, field, groups, rounds or 0)
    return {**values, **groups}


def _types(names: Any) -> Any:
    """The types of inputs by their names, in the structure in which they are written."""
    if isinstance(names, dict):
        return {name: _types(each) for name, each in names.items()}
    if isinstance(names, tuple):
        return tuple(map(_types, names))
    return None if names is None else getattr(torch, names)


def _batch(file: TensorFile, parts: dict[str, Tensor]) -> Batch:
    """Public samples: `inputs`, or `inputs.PART` for each of several tensors, and `labels`."""
    inputs = from_names(parts)
    wanted = ("inputs",) if inputs is None else tuple(by_name(inputs))
    labels = _exactly(file, "public_data", parts, (*wanted, "labels"))[-1]
    assert inputs is not None
    if any(tensor.dim() == 0 or len(tensor) != len(labels) for tensor in tensors_of(inputs)) or labels.dim() == 0:
        raise BadCapture(f"{file.name} needs as many public_data.labels as samples.")
    return Batch(inputs, labels)


def _grouped(file: TensorFile) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Whole tensors by field, and those of fields in parts by field and part; unknown names are refused."""
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for name in file:
        field, _, part = name.partition(".")
        if name == "labels" or name in TENSOR_FIELDS:
            values[name] = file[name]
        elif part and (field in GROUPED_FIELDS or field.partition("[")[0] in ROUND_FIELDS):
            groups.setdefault(field, {})[part] = file[name]
        else:
            raise BadCapture(
                f"{file.name} holds {shown(name)}, which is not a field of knowledge. Remove or rename it."
            )
        if len(file.shape(name)) != TENSOR_FIELDS.get(name, len(file.shape(name))):
            raise BadCapture(
                f"'{name}' in {file.name} has shape {shown(file.shape(name))}; it needs {TENSOR_FIELDS[name]} "
                "dimensions."
            )
    return values, groups


def _one_per_round(
    file: TensorFile, field: str, groups: dict[str, dict[str, Tensor]], rounds: int
) -> tuple[dict[str, Tensor], ...]:
    """The mappings `field[0]`, `field[1]`, ..., taken out of the groups."""
    names = sorted(name for name in groups if name.startswith(f"{field}["))
    expected = [f"{field}[{number}]" for number in range(rounds)]
    if field in groups or names != sorted(expected):
        raise BadCapture(
            f"{file.name} must hold '{field}' once, or as {field}[0], ... for each round seen client by "
            f"client, not as {shown(names)}."
        )
    return tuple(groups.pop(name) for name in expected)


def _exactly(file: TensorFile, field: str, parts: dict[str, Tensor], wanted: Iterable[str]) -> list[Tensor]:
    """The wanted parts in their order, once there are no others."""
    names = list(wanted)
    if odd := sorted(parts.keys() ^ set(names)):
        problem = "an unexpected" if odd[0] in parts else "no"
        raise BadCapture(
            f"'{field}' in {file.name} needs {len(names)} parts, but there is {problem} {shown(f'{field}.{odd[0]}')}."
        )
    return [parts[name] for name in names]


def _check_labels(labels: Tensor, batch_size: int | None, classes: int | None, loss: str | None) -> None:
    if loss not in (None, "cross_entropy", "softmax_mse"):  # numbers to be predicted, or yes and no
        fits = labels.dim() >= 1
    elif labels.dim() > 1 and not labels.is_floating_point():  # one class for each token or pixel
        counted = labels[labels != losses.IGNORED_LABEL]
        fits = not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < (classes or MOST_CLASSES))
    elif labels.dim() > 2:
        fits = bool((labels >= 0).all())
    elif is_soft(labels):
        fits = bool((labels >= 0).all()) and classes in (None, labels.shape[1])
    else:
        fits = labels.dtype == torch.int64 and labels.dim() == 1 and bool((labels >= 0).all())
        fits = fits and (classes is None or bool((labels < classes).all()))
    if not fits:
        raise BadCapture(
            "labels must be int64 class numbers or rows of class weights, of "
            f"{'the' if classes is None else classes} classes, not {labels.dtype} of shape "
            f"{shown(tuple(labels.shape))} with values from {labels.min():g} to {labels.max():g}."
        )
    if batch_size is not None and len(labels) != batch_size:
        raise BadCapture(f"batch_size is {batch_size}, but there are {len(labels)} labels. Correct one of them.")


def _check_public(data: Batch, entry: KnowledgeEntry, classes: int | None) -> None:
    shape, types = shape_of(data.inputs), types_of(data.inputs)
    fits = entry.input_shape in (None, shape) and (entry.input_types is None or _types(entry.input_types) == types)
    if not fits or (entry.input_types is None and (not are_floating(types) or shape == ())):
        wanted = "floating-point numbers" if entry.input_types is None else shown(entry.input_types)
        of_shape = "" if entry.input_shape is None else f" of shape {shown(entry.input_shape)}"
        raise BadCapture(
            f"public_data.inputs must be {wanted}{of_shape}, not {types} of shape {shown(shape)}. Correct one of them."
        )
    _check_labels(data.labels, len(data), classes, entry.loss)
