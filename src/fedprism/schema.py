"""The words of a capture (`capture.json`), checked before anything else is done with it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedprism.errors import BadCapture

FORMAT = "fedprism-capture/1"

Size = Annotated[int, Field(ge=1, le=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _shape_of_sane_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    product = 1
    for size in shape:
        product *= size
    if product > 2**28:
        raise ValueError(f"at most {2**28} values in one input, found {product}")
    return shape


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError(f"the low bound below the high one, found {bounds[0]} and {bounds[1]}")
    return bounds


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelEntry(_Strict):
    name: Annotated[str, Field(max_length=100)] | None = None
    kwargs: dict[str, Any] = {}
    training: bool = True


class DefenseEntry(_Strict):
    name: Annotated[str, Field(max_length=100)]
    kwargs: dict[str, Finite | int | bool | str] = {}


class KnowledgeEntry(_Strict):
    input_shape: (
        Annotated[tuple[Size, ...], Field(min_length=1, max_length=4), AfterValidator(_shape_of_sane_size)] | None
    ) = None
    bounds: Annotated[tuple[Finite, Finite], AfterValidator(_rising)] | None = None
    normalization: tuple[tuple[Finite, ...], tuple[Positive, ...]] | None = None
    batch_size: Annotated[int, Field(ge=1, le=2**20)] | tuple[Size, ...] | None = None
    examples: tuple[Size, ...] | None = None
    loss: Annotated[str, Field(max_length=100)] | None = None
    local_lr: Positive | None = None
    local_epochs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    local_batch_size: Size | None = None
    local_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    defense: DefenseEntry | Annotated[tuple[DefenseEntry, ...], Field(max_length=100)] | None = None


class RoundEntry(_Strict):
    kind: Literal["gradient", "delta"]
    params: str
    update: str
    clients: Size = 1
    reduction: Literal["sum", "mean", "weighted_mean"] = "mean"
    index: Annotated[int, Field(ge=0, le=2**31)] | None = None
    participants: tuple[str, ...] | None = None
    examples: tuple[Size, ...] | None = None
    buffers_before: str | None = None
    buffers_after: str | None = None


class CaptureFile(_Strict):
    format: Literal["fedprism-capture/1"]
    rounds: Annotated[tuple[RoundEntry, ...], Field(min_length=1, max_length=1_000_000)]
    model: ModelEntry = ModelEntry()
    knowledge: KnowledgeEntry = KnowledgeEntry()
    source: str = ""


def parse(text: bytes) -> CaptureFile:
    """The contents of a capture.json, or one sentence that names the first key that is wrong."""
    try:
        return CaptureFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        problem = first["msg"].replace("\n", " ").removeprefix("Value error, ")
        raise BadCapture(
            f"expected a capture.json of {FORMAT}, found a problem at '{where[:200]}' ({problem[:300]}); "
            "correct or remove that key."
        ) from error
