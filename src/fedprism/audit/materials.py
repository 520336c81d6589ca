"""What a plan's names stand for: the samples that clients draw from, and the model that they train."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedprism import data as datasets
from fedprism.audit.plan import DataPart, ModelPart, Plan
from fedprism.checks import arguments, shown
from fedprism.data.source import DAMAGE, MOST_BYTES
from fedprism.data.tabular import TABLES, Column, TableSet, read_csv
from fedprism.data.texts import TextSet, read_texts
from fedprism.errors import BadInput, BadPlan
from fedprism.files.tensors import TensorFile
from fedprism.inputs import shape_of, single_shape, tensors_of
from fedprism.losses import LOSSES
from fedprism.metrics import METRICS, LpipsUnavailable
from fedprism.models import MODELS, build
from fedprism.models.factory import data_from, from_factory, function_from
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator, seeded_layers
from fedprism.types import Batch, LossFn, Observation

BOUNDS_SLACK = 0.01
"""Share of the range by which inputs may exceed their bounds: resized pictures do."""


class Samples(Protocol):
    """A data set: images, rows of a table, or a user's own arrays."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def classes(self) -> int: ...
    def __len__(self) -> int: ...
    def batch(self, indices: Sequence[int] | Tensor) -> Batch: ...


@dataclass(frozen=True, eq=False)
class ArraySet:
    """A user's own arrays: inputs (count, *input_shape), labels (count,)."""

    name: str
    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        chosen = torch.as_tensor(indices)
        inputs = self.inputs[chosen]
        return Batch(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float(), self.labels[chosen])


@dataclass(frozen=True, eq=False)
class OwnSet:
    """What a user's own function returned, as it is: any inputs, any labels."""

    name: str
    data: Batch

    @property
    def labels(self) -> Tensor:
        return self.data.labels

    def __len__(self) -> int:
        return len(self.data)

    @property
    def classes(self) -> int:
        whole = self.labels.dim() == 1 and not self.labels.is_floating_point()
        return int(self.labels.max()) + 1 if whole else max(1, self.labels[0].numel())

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        return self.data[torch.as_tensor(indices)]


@dataclass(frozen=True)
class Setup:
    """A plan and where it lies: all that a worker needs to run any of its cells."""

    plan: Plan
    base: Path
    """Paths of the plan start here."""
    data_dir: Path | None = None
    allow_download: bool = False
    """Whether LPIPS may fetch its network. Data and models are never fetched."""
    given: Materials | None = None
    """What was handed over instead of named: such an audit runs in this process."""
    model: nn.Module | None = None
    """A model that is handed over, which captures are of that name none."""
    loss: LossFn | None = None
    """A loss that is handed over, which captures cannot name."""

    def require_metrics(self) -> None:
        """Have everything there that the plan's metrics need, before a long computation and not after it."""
        captures, shape = self.plan.captures, None
        if captures is None:
            samples = self.materials().samples
            assert samples is not None
            shape = shape_of(samples.batch([0]).inputs)
        if (captures is not None and not captures.truths) or (shape is not None and len(shape) != 3):
            return  # nothing to compare with, or no images
        image = torch.zeros(1, 3, 32, 32)
        for name in (word for word in self.plan.scores.metrics if word.startswith("lpips-")):
            try:
                METRICS[name].function(image, image, allow_download=self.allow_download)
            except LpipsUnavailable as reason:
                hint = "" if self.allow_download else " with --allow-download"
                raise BadInput(f"{str(reason).rstrip('.')}{hint}.") from reason

    def materials(self) -> Materials:
        """Loaded once per process."""
        if self.given is not None:
            return self.given
        global _LAST_LOADED
        key = (self.plan.model_dump_json(include={"model", "data"}), self.base, self.data_dir, self._file_times())
        if _LAST_LOADED is None or _LAST_LOADED[0] != key:
            _LAST_LOADED = (key, _loaded(self.plan, self.base, self.data_dir))
        return _LAST_LOADED[1]

    def _file_times(self) -> tuple[int, ...]:
        """When the plan's files were last written: a process that loaded them before loads changed ones again."""
        data, model = self.plan.data, self.plan.model
        names = ((data.npz, data.csv, data.folder, data.texts, data.tokenizer) if data else ()) + (
            (model.weights,) if model else ()
        )
        paths = (self.base / name for name in names if name is not None)
        return tuple(path.stat().st_mtime_ns for path in paths if path.exists())

    def fingerprint(self) -> dict[str, str]:
        """What data, weights and captures are, in a few letters: an audit is continued only with the same ones."""
        captures = self.plan.captures
        folders = [*captures.folders, *captures.truths] if captures is not None else []
        files = [file for folder in folders for file in sorted((self.base / folder).rglob("*")) if file.is_file()]
        return {**self.materials().fingerprint(), **({"captures": _files_digest(files)} if files else {})}

    def observation(self, folder: str, updates: Sequence[int] | None = None) -> Observation:
        """A capture of the plan, which may name a model and what else is known where the capture does not.

        updates: only those at these places.
        """
        from fedprism import captures

        part, recorded = self.plan.model, self.plan.captures
        model = self.materials().network(0) if part is not None else self.model
        capture = captures.load(self.base / folder, model=model, updates=updates)
        given = recorded.knowledge.fields() if recorded is not None else {}
        if isinstance(given.get("loss"), str):
            given["loss"] = self.materials().loss(given["loss"])
        given |= {"loss": self.loss} if self.loss is not None else {}
        lacking = {name: value for name, value in given.items() if name not in capture.knowledge.granted()}
        return replace(capture, knowledge=replace(capture.knowledge, **lacking)) if lacking else capture


@dataclass(frozen=True, eq=False)
class Materials:
    """Samples, and how they become inputs. `samples` is None where captures are attacked."""

    samples: Samples | None
    model: ModelPart | None
    base: Path
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: Normalization | None = None
    _networks: dict[int, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> tuple[Column, ...] | None:
        """The columns of a table, None for everything else."""
        return self.samples.columns if isinstance(self.samples, TableSet) else None

    @property
    def words(self) -> Mapping[int, str]:
        """How the tokens of texts are written; nothing for everything else."""
        return self.samples.words if isinstance(self.samples, TextSet) else {}

    def batch(self, indices: Tensor) -> Batch:
        """Samples as the model is fed them."""
        assert self.samples is not None
        drawn = self.samples.batch(indices)
        return drawn if self.normalization is None else drawn.map(lambda t: to_inputs(t, self.normalization))

    def other_bounds(self) -> tuple[float, float] | None:
        """Bounds that samples of npz files and factories keep, if they do not keep those of the plan."""
        if not isinstance(self.samples, ArraySet | OwnSet):
            return None
        tensors = tensors_of(self.samples.batch(range(len(self.samples))).inputs)
        values = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        low = min((float(tensor.min()) for tensor in values), default=self.bounds[0])
        high = max((float(tensor.max()) for tensor in values), default=self.bounds[1])
        slack = BOUNDS_SLACK * (self.bounds[1] - self.bounds[0])
        if self.bounds[0] - slack <= low and high <= self.bounds[1] + slack:
            return None
        digits = 10 ** max(0, 2 - math.floor(math.log10(high - low))) if high > low else 1
        return math.floor(low * digits) / digits, math.ceil(high * digits) / digits

    def loss(self, name: str) -> str | LossFn:
        """A loss of the table by its name, or a user's own function."""
        return name if name in LOSSES else function_from(name, beside=self.base, asked_as="a loss")

    def network(self, seed: int) -> nn.Module:
        """The model as a seed makes it, for whoever leaves it as it is: of one seed it is made once.

        Weights from a file are the same for every seed.
        """
        if self._networks.keys() != {seed}:
            self._networks.clear()
            self._networks[seed] = self.new_network(seed)
        return self._networks[seed]

    def new_network(self, seed: int) -> nn.Module:
        """The same, for whoever trains it."""
        assert self.model is not None
        if self.model.factory is not None:
            with seeded_layers(generator(seed, "weights")):
                model = from_factory(self.model.factory, beside=self.base, asked_as="model.factory")
        else:
            assert self.model.name is not None
            model = build(self.model.name, seed=seed, **self._kwargs(self.model.name, self.model.kwargs))
        if self.model.weights is not None:
            _load_weights(model, self.base / self.model.weights)
        return model

    def _kwargs(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """input_shape and classes are the data's unless they are stated."""
        assert self.samples is not None
        shape = list(single_shape(shape_of(self.samples.batch([0]).inputs)))
        from_data = {"input_shape": shape, "classes": self.samples.classes}
        accepted = inspect.signature(MODELS[name]).parameters
        return {**{key: value for key, value in from_data.items() if key in accepted}, **given}

    def fingerprint(self) -> dict[str, str]:
        """What data and weights are."""
        digests = {}
        if self.samples is not None:
            tensors = [value for value in vars(self.samples).values() if isinstance(value, Tensor)]
            if isinstance(self.samples, OwnSet):
                tensors = [*tensors_of(self.samples.data.inputs), self.samples.labels]
            digests["data"] = _digest(tensors)
        if self.model is not None and self.samples is not None:
            digests["model"] = _digest(list(self.network(0).state_dict().values()))
        return digests


_LAST_LOADED: tuple[tuple[Any, ...], Materials] | None = None
"""What a process loaded last, and for which plan. One is enough: a worker runs one audit."""


def _loaded(plan: Plan, base: Path, data_dir: Path | None) -> Materials:
    if plan.data is None:
        return Materials(None, plan.model, base)
    samples = _samples(plan.data, base, data_dir)
    normalization = plan.data.normalization
    channels = None if normalization is None else samples.batch([0]).tensor.shape[1]
    if normalization is not None and not len(normalization[0]) == len(normalization[1]) == channels:
        raise BadPlan(
            f"data.normalization of the plan needs {channels} means and stds, one per channel, not "
            f"{len(normalization[0])} and {len(normalization[1])}."
        )
    return Materials(samples, plan.model, base, plan.data.bounds, normalization)


def _samples(part: DataPart, base: Path, data_dir: Path | None) -> Samples:
    options: dict[str, Any] = dict(part.options)
    if part.csv is not None:
        assert part.label is not None
        given = {"path": base / part.csv, "label": part.label, "categorical": part.categorical, **options}
        return read_csv(**arguments(read_csv, given, "a csv file"))
    if part.texts is not None:
        assert part.tokenizer is not None
        places = {} if part.places is None else {"places": part.places}
        return read_texts(base / part.texts, base / part.tokenizer, column=part.column, **places)
    if part.npz is not None or part.factory is not None:
        if options:
            raise BadPlan(f"your own arrays take no options, but {shown(options)} is given. Remove it.")
        if part.factory is not None:
            with seeded_layers(generator(0, "data")):
                return OwnSet(part.factory, data_from(part.factory, beside=base))
        assert part.npz is not None
        return _arrays(base / part.npz)
    if part.folder is not None:
        return datasets.load(f"folder:{base / part.folder}", **options)
    assert part.name is not None
    if part.name in TABLES:
        return TABLES[part.name](**arguments(TABLES[part.name], options, f"the table {part.name}"))
    if part.name not in datasets.DATASETS:
        from fedprism.naming import nearest

        known = [*datasets.DATASETS, *TABLES]
        raise BadPlan(f"data.name of the plan: no data set is called {shown(part.name)}; {nearest(part.name, known)}")
    return datasets.load(part.name, data_dir=data_dir, **options)


def _arrays(path: Path) -> ArraySet:
    """An npz file with inputs and labels; never a pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            inputs, labels = np.array(arrays["inputs"]), np.array(arrays["labels"])
        numbers = inputs.dtype == np.uint8 or np.issubdtype(inputs.dtype, np.floating)
        if not numbers or inputs.ndim < 2 or len(inputs) == 0 or labels.shape != inputs.shape[:1]:
            raise ValueError(f"inputs {inputs.dtype} {inputs.shape} and labels {labels.dtype} {labels.shape}")
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or not np.isfinite(inputs).all():
            raise ValueError("labels are not class numbers, or inputs are not finite")
    except DAMAGE as error:
        raise BadInput(
            f"'{path.name}' must hold the arrays inputs (count, ...) of bytes or floats and labels "
            f"(count,) of whole numbers ({error}). Write the file again."
        ) from error
    return ArraySet(path.name, torch.from_numpy(inputs), torch.from_numpy(labels.astype(np.int64)))


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise BadInput(f"{path.name}: no such file. Correct model.weights of the plan.")
    file = TensorFile(path)
    try:
        model.load_state_dict({name: file[name] for name in file})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"'{path.name}' is not the state_dict of the plan's model ({reason}). Save the weights again."
        ) from error


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _files_digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def plan_folder(path: str | os.PathLike[str]) -> Path:
    """Where the paths of a plan start."""
    return Path(path).resolve().parent
