"""The words of a capture (`capture.json`) and bounds on sizes, checked before anything else is done with it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fedprism.errors import BadCapture
from fedprism.files.strict import Strict

FORMAT = "fedprism-capture/1"
MANIFEST = "capture.json"
KNOWLEDGE_FILE = "knowledge.safetensors"
TRAPDOOR_FILE = "trapdoor.safetensors"

MOST_MANIFEST_BYTES = 2**24
"""Bytes of a manifest that are parsed: about 50,000 rounds."""
MOST_INPUT_VALUES = 2**24
"""Values of one input: a picture of 2364 x 2364 in three colours."""
MOST_TENSORS = 100
"""Tensors that one sample may consist of."""
MOST_BATCH_VALUES = 2**28
"""Values of one batch: 1 GiB in single precision, which an attack allocates before it knows better."""
MOST_LOCAL_STEPS = 10_000
"""Local steps of one client, which an attack repeats in every iteration."""

PLAIN_FIELDS = ("input_shape", "bounds", "normalization", "batch_size", "examples")
LOCAL_FIELDS = ("local_lr", "local_epochs", "local_batch_size", "local_momentum")
TENSOR_FIELDS = {"windows": 2, "counts": 2, "participation": 2, "cohort_sizes": 1}
"""Knowledge that is one tensor, and how many dimensions it has. Labels, whose shape varies, are a case of their own."""
UPDATE_FIELDS = ("batchnorm_exact", "batchnorm_running", "mixing")
"""Knowledge that is a mapping of tensors: written as `field.name`, or `field[0].name`, ... where each round has one."""
ROUND_FIELDS = ("batchnorm_exact",)
"""Those of them that may be one mapping a round."""

Size = Annotated[int, Field(ge=1, le=2**31)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=100)]
FileName = Annotated[str, Field(min_length=1, max_length=1000)]
# Wide enough for any real setting, narrow enough that arithmetic with them stays finite in single precision.
Finite = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
Setting = Annotated[int, Field(ge=-(2**53), le=2**53)] | Finite | bool | Name | None


def _values(shape: Any) -> int:
    """How many values one sample holds; `shape` is one tensor's, or one for each tensor."""
    each = list(shape.values()) if isinstance(shape, dict) else list(shape)
    return sum(map(math.prod, each)) if each and isinstance(each[0], tuple) else math.prod(each)


def _sane_size(shape: Any) -> Any:
    if _values(shape) > MOST_INPUT_VALUES:
        raise ValueError(f"one input holds at most {MOST_INPUT_VALUES} values, not {_values(shape)}")
    return shape


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError(f"the low bound must be below the high one, not {bounds[0]} and {bounds[1]}")
    return bounds


OneShape = Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)]
Part = Annotated[tuple[Size, ...], Field(max_length=4)]
"""The shape of one of several tensors; () is one number a sample."""
Shapes = Annotated[tuple[Part, ...], Field(min_length=1, max_length=MOST_TENSORS)]
NamedShapes = Annotated[dict[Name, Part], Field(min_length=1, max_length=MOST_TENSORS)]
InputShape = Annotated[OneShape | Shapes | NamedShapes, AfterValidator(_sane_size)]
TypeName = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class ModelEntry(Strict):
    name: Name | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    training: bool = True


class DefenseEntry(Strict):
    name: Name
    kwargs: dict[str, Setting | tuple[Setting, ...]] = Field(default_factory=dict)


class OptimizerEntry(Strict):
    name: Name
    kwargs: dict[str, Setting] = Field(default_factory=dict)


class KnowledgeEntry(Strict):
    input_shape: InputShape | None = None
    input_types: TypeName | tuple[TypeName, ...] | dict[Name, TypeName] | None = None
    bounds: Annotated[tuple[Finite, Finite], AfterValidator(_rising)] | None = None
    normalization: tuple[tuple[Finite, ...], tuple[Positive, ...]] | None = None
    batch_size: Annotated[int, Field(ge=1, le=2**20)] | tuple[Count, ...] | None = None
    examples: tuple[Size, ...] | None = None
    loss: Name | None = None
    local_lr: Positive | None = None
    local_epochs: Annotated[int, Field(ge=1, le=MOST_LOCAL_STEPS)] | None = None
    local_batch_size: Size | None = None
    local_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    local_optimizer: OptimizerEntry | None = None
    count_release: DefenseEntry | None = None
    defense: DefenseEntry | Annotated[tuple[DefenseEntry, ...], Field(max_length=100)] | None = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch size of each round where they differ, the one of all rounds, or nothing."""
        sizes = self.batch_size
        return sizes if isinstance(sizes, tuple) else (sizes,) if sizes is not None else ()

    @model_validator(mode="after")
    def _fits_together(self) -> KnowledgeEntry:
        if self.input_types is not None and not _same_structure(self.input_types, self.input_shape):
            raise ValueError("input_types must have the structure of input_shape, one type for each tensor")
        self.check_values(max(self.batch_sizes, default=1), "batch_size")
        if self.normalization is not None:
            mean, std = self.normalization
            shape = self.input_shape
            one = isinstance(shape, tuple) and bool(shape) and isinstance(shape[0], int)
            channels = shape[0] if one and isinstance(shape, tuple) else max(len(mean), 1)
            if not len(mean) == len(std) == channels:
                raise ValueError(
                    f"normalization needs {channels} means and stds, one per channel, not {len(mean)} and {len(std)}"
                )
        return self

    def check_values(self, size: int, field: str) -> None:
        """Whether a batch of `size` samples, which `field` states, is one that may be computed with."""
        if size * _values(self.input_shape or ()) > MOST_BATCH_VALUES:
            raise ValueError(
                f"a batch holds at most {MOST_BATCH_VALUES} values; {field} is {size} and input_shape "
                f"{self.input_shape}"
            )

    def check_steps(self, size: int, field: str) -> None:
        """Whether a client that trains on `size` samples takes no more local steps than may be repeated."""
        steps = (self.local_epochs or 1) * math.ceil(size / (self.local_batch_size or max(size, 1)))
        if steps > MOST_LOCAL_STEPS:
            raise ValueError(
                f"at most {MOST_LOCAL_STEPS} local steps are allowed; {field}, local_batch_size and "
                f"local_epochs give {steps}"
            )


def _same_structure(types: Any, shape: Any) -> bool:
    if isinstance(types, dict):
        return isinstance(shape, dict) and types.keys() == shape.keys()
    several = isinstance(shape, tuple) and bool(shape) and isinstance(shape[0], tuple)
    if isinstance(types, tuple):
        return several and len(types) == len(shape)
    return isinstance(shape, tuple) and not several


class RoundEntry(Strict):
    kind: Literal["gradient", "delta"]
    params: FileName
    update: FileName
    clients: Count = 1
    reduction: Literal["sum", "mean", "weighted_mean"] = "mean"
    index: Annotated[int, Field(ge=0, le=2**31)] | None = None
    participants: tuple[Annotated[str, Field(max_length=1000)], ...] | None = None
    examples: tuple[Size, ...] | None = None
    buffers_before: FileName | None = None
    buffers_after: FileName | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> RoundEntry:
        for name, values in (("participants", self.participants), ("examples", self.examples)):
            if values is not None and len(values) != self.clients:
                raise ValueError(f"{self.clients} clients need as many {name}, not {len(values)}")
        if self.clients == 0 and self.reduction != "sum":
            raise ValueError(f"a {self.reduction} needs at least one client")
        return self


class CaptureFile(Strict):
    format: Literal["fedprism-capture/1"]
    rounds: Annotated[tuple[RoundEntry, ...], Field(min_length=1)]
    model: ModelEntry | None = None
    knowledge: KnowledgeEntry = KnowledgeEntry()
    source: Annotated[str, Field(max_length=10_000)] = ""

    @model_validator(mode="after")
    def _fits_together(self) -> CaptureFile:
        sizes = self.knowledge.batch_size
        if isinstance(sizes, tuple) and len(sizes) != len(self.rounds):
            raise ValueError(f"batch_size needs one value for each of {len(self.rounds)} rounds, not {len(sizes)}")
        per_round = sizes if isinstance(sizes, tuple) else [sizes or 1] * len(self.rounds)
        for entry, size in zip(self.rounds, per_round, strict=True):
            if size == 0 and entry.clients > 0:
                raise ValueError(f"batch_size is 0, but {entry.clients} clients took part")
            if entry.clients <= 1:  # the local steps of an aggregate are not repeated
                self.knowledge.check_steps(size, "batch_size")
        if len(self.rounds) == 1 and self.rounds[0].clients == 0:
            raise ValueError("the only round has no client")
        if self.of_aggregates and self.knowledge.examples:  # each may become a client's own batch
            self.knowledge.check_values(max(self.knowledge.examples), "examples")
            self.knowledge.check_steps(max(self.knowledge.examples), "examples")
        return self

    @property
    def of_aggregates(self) -> bool:
        """Whether several aggregates were seen, which may be taken apart into clients."""
        return len(self.rounds) > 1 and any(entry.clients != 1 for entry in self.rounds)


def parse(text: bytes) -> CaptureFile:
    """The contents of a capture.json, or one sentence that names the first key that is wrong."""
    try:
        return CaptureFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        keys = [str(part) for part in first["loc"] if not _UNION_TAG.fullmatch(str(part))]
        where = repr(".".join(keys)[:80]) if keys else "the top level"
        problem = first["msg"].replace("\n", " ").removeprefix("Value error, ")
        raise BadCapture(f"{MANIFEST} of {FORMAT} has an error at {where}: {problem[:300]}.") from error


_UNION_TAG = re.compile(r"(constrained-)?(int|float|bool|str|none)|DefenseEntry|[a-z-]+\[.*", re.DOTALL)
"""What pydantic adds to the place of an error where several types are allowed."""
