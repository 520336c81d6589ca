"""The plan of an audit: a TOML file, every key of it checked before anything is computed.

    [model]
    name = "fc2"

    [data]
    name = "photos"

is a whole plan: what it leaves out is chosen by what the model and the data are. `fedprism init` writes one with
every key explained.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fedprism.audit.entries import (
    AttackEntry,
    ChainEntry,
    CountsEntry,
    MethodSettings,
    OptimizerEntry,
    ProtocolEntry,
    ThreatEntry,
    Word,
)
from fedprism.audit.sentences import sentence
from fedprism.checks import row, shown
from fedprism.errors import BadPlan, FedprismError
from fedprism.files.strict import Strict

MOST_PLAN_BYTES = 2**20
"""A larger plan is not read: the template has 4 kB."""
MOST_ENTRIES = 1000
"""Entries of one list of a plan."""

Count = Annotated[int, Field(ge=1, le=2**20)]
Seed = Annotated[int, Field(ge=0, le=2**53)]
Path_ = Annotated[str, Field(min_length=1, max_length=1000)]
Part = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    doubled = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if doubled is not None:
        raise ValueError(f"{shown(doubled)} is given twice")
    return values


Sizes = Annotated[tuple[Count, ...], Field(min_length=1, max_length=MOST_ENTRIES), AfterValidator(_different)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MOST_ENTRIES), AfterValidator(_different)]


def _checked_in(table_of: str, kind: str) -> AfterValidator:
    def check(value: Any) -> Any:
        words = value if isinstance(value, tuple) else (value,)
        try:
            for word in words:
                if table_of == "losses" and re.fullmatch(CODE, word):
                    continue  # a user's own, imported where it is used
                row(_table(table_of), word, kind)
        except FedprismError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(check)


def _table(name: str) -> dict[str, Any]:
    """Looked up late: torch is not needed to write a plan."""
    if name == "metrics":
        from fedprism.metrics import METRICS

        return dict(METRICS)
    if name == "models":
        from fedprism.models import MODELS

        return dict(MODELS)
    from fedprism.losses import LOSSES

    return dict(LOSSES)


CODE = r"^[\w.]+:\w+$"
"""A function of a user's own, pkg.module:function."""
Code = Annotated[str, Field(pattern=CODE, max_length=200)]


class ModelPart(Strict):
    name: Annotated[Word, _checked_in("models", "model")] | None = Field(
        default=None, description="a model of `fedprism list models`"
    )
    factory: Code | None = Field(
        default=None, description="pkg.module:function, your code that returns the model; auditing imports it"
    )
    kwargs: dict[str, Any] = Field(
        default={}, description="settings of the named model; input_shape and classes come from the data"
    )
    weights: Path_ | None = Field(default=None, description="a safetensors file with the model's state_dict")
    training: bool = Field(default=True, description="whether clients train in train mode")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.name is None) == (self.factory is None):
            raise ValueError("give either name or factory")
        if self.factory is not None and self.kwargs:
            raise ValueError("kwargs belong to a model of the table, not to a factory")
        return self


class DataPart(Strict):
    name: Word | None = Field(default=None, description="a data set of `fedprism list data`, or a made-up table")
    folder: Path_ | None = Field(default=None, description="a folder of your images, or of one folder a class")
    npz: Path_ | None = Field(default=None, description="your file with the arrays inputs and labels")
    csv: Path_ | None = Field(default=None, description="your table with a header line")
    texts: Path_ | None = Field(default=None, description="your texts: lines, or a column of a .csv or .jsonl file")
    tokenizer: Path_ | None = Field(default=None, description="the tokenizer.json of the model that is fed the texts")
    column: Word | None = Field(default=None, description="the column of a file of texts")
    places: Count | None = Field(default=None, description="tokens of a text; longer texts are cut")
    factory: Code | None = Field(
        default=None, description="pkg.module:function, your code that returns inputs and labels; auditing imports it"
    )
    label: Word | None = Field(default=None, description="the column of the table that is learned")
    categorical: tuple[Word, ...] = Field(default=(), description="columns that are categories though they are numbers")
    options: MethodSettings = Field(default={}, description="options of the data set, such as size or limit")
    bounds: tuple[Finite, Finite] = Field(
        default=(0.0, 1.0), description="the range of the inputs of an npz file or a factory"
    )
    normalization: tuple[tuple[Finite, ...], tuple[Positive, ...]] | None = Field(
        default=None, description="mean and std of each channel, by which pixels become inputs"
    )
    public: Annotated[int, Field(ge=0, le=2**20)] = Field(
        default=0, description="how many further samples an attacker holds, if public_data is granted"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [key for key in ("name", "folder", "npz", "csv", "texts", "factory") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give one of name, folder, npz, csv, texts and factory, not {' and '.join(given) or 'none'}"
            )
        if (self.texts is None) != (self.tokenizer is None):
            raise ValueError("texts need a tokenizer, and other data have none")
        if self.texts is None and (self.column is not None or self.places is not None):
            raise ValueError("column and places are for texts only")
        if (self.csv is None) != (self.label is None):
            raise ValueError("a csv file needs a label column, and other data have none")
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"the low bound must be below the high one, not {self.bounds[0]} and {self.bounds[1]}")
        if self.npz is None and self.factory is None and self.bounds != (0.0, 1.0):
            raise ValueError("bounds belong to an npz file or a factory; other data are in [0, 1]")
        return self


class RecordedPart(Strict):
    """What is known beside recorded updates. What a capture tells itself is taken from there."""

    input_shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)] | None = Field(
        default=None, description="the shape of one sample, as the model is fed it"
    )
    bounds: tuple[Finite, Finite] | None = Field(default=None, description="the range of pixels")
    normalization: tuple[tuple[Finite, ...], tuple[Positive, ...]] | None = Field(
        default=None, description="mean and std of each channel, by which pixels become inputs"
    )
    loss: Annotated[Word, _checked_in("losses", "loss")] | None = Field(
        default=None, description="what clients minimised"
    )
    batch_size: Count | None = Field(default=None, description="samples behind each update")
    local_lr: Positive | None = Field(default=None, description="the step size of local training")
    local_epochs: Count | None = Field(default=None, description="passes over the data between two updates")
    local_batch_size: Count | None = Field(default=None, description="samples a local step")
    local_momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="the momentum of local training"
    )
    local_optimizer: OptimizerEntry | None = Field(
        default=None, description="what clients step with: sgd, adam or adamw, or a table with its settings"
    )

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        if self.local_optimizer is not None and self.local_optimizer.combinations > 1:
            raise ValueError("each setting of local_optimizer takes one value")
        return self

    def fields(self) -> dict[str, Any]:
        """What is known, as fields of `Knowledge`."""
        given = self.model_dump(exclude_none=True)
        return given if self.local_optimizer is None else {**given, "local_optimizer": self.local_optimizer.method}


class CapturesPart(Strict):
    folders: Annotated[tuple[Path_, ...], Field(min_length=1, max_length=MOST_ENTRIES), AfterValidator(_different)] = (
        Field(description="folders with captures, as the recorder writes them")
    )
    truths: tuple[Path_, ...] = Field(
        default=(), description="a folder with ground truth for each capture, to score against"
    )
    most_updates: Count = Field(
        default=12, description="how many updates of a capture are attacked one by one, chosen by what may leak most"
    )
    knowledge: RecordedPart = Field(
        default=RecordedPart(), description="what is known beside the updates, if captures do not say it"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.truths and len(self.truths) != len(self.folders):
            raise ValueError(
                f"give a folder with ground truth for each of {len(self.folders)} captures or for none, not "
                f"{len(self.truths)}"
            )
        return self


class FederationPart(Strict):
    rounds: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="how many rounds are watched")
    aggregation: Literal["mean", "sum", "weighted_mean"] = Field(default="mean", description="how updates are combined")
    participation: Part | None = Field(default=None, description="how likely a client takes part in a round")
    frozen: bool = Field(default=False, description="whether the server sends the same model in every round")
    window: Count | None = Field(default=None, description="rounds over which devices report how often they took part")
    counts: CountsEntry | None = Field(default=None, description="how exactly devices report these counts")
    drift: Positive | None = Field(default=None, description="after how many rounds half of an update is new")
    fraction: Part = Field(default=1.0, description="the share of its data that a client trains on in a round")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.window is not None and self.window > self.rounds:
            raise ValueError(f"a window has at most {self.rounds} rounds, not {self.window}")
        if self.counts is not None and self.window is None:
            raise ValueError("counts need a window")
        return self


class GridPart(Strict):
    """Every combination is a cell. What is left out of `threats` and `attacks` is chosen by what applies."""

    clients: Sizes = Field(default=(1,), description="how many clients take part")
    batch_sizes: Sizes = Field(default=(1, 8), description="how many samples each client trains on")
    protocols: Annotated[tuple[ProtocolEntry, ...], Field(min_length=1, max_length=MOST_ENTRIES)] = Field(
        default=(ProtocolEntry(name="fedsgd"),), description="fedsgd, or fedavg with lr, epochs and batch_size"
    )
    losses: Annotated[
        tuple[Word, ...], Field(min_length=1, max_length=100), AfterValidator(_different), _checked_in("losses", "loss")
    ] = Field(
        default=("cross_entropy",),
        description="what clients minimise: by name, or pkg.module:function",
    )
    defenses: Annotated[tuple[ChainEntry, ...], Field(min_length=1, max_length=MOST_ENTRIES)] = Field(
        default=((),), description='defenses with their strengths, lists of them as chains, or "none"'
    )
    threats: Annotated[tuple[ThreatEntry, ...], Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="who attacks, and what they know beyond that"
    )
    attacks: Annotated[tuple[AttackEntry, ...], Field(min_length=1, max_length=MOST_ENTRIES)] | None = Field(
        default=None, description="methods of attack with their settings"
    )
    seeds: Seeds = Field(default=(0, 1, 2), description="each seed draws data, weights and noise anew")


class ScoresPart(Strict):
    metrics: Annotated[
        tuple[Word, ...],
        Field(min_length=1, max_length=50),
        AfterValidator(_different),
        _checked_in("metrics", "metric"),
    ] = Field(
        default=("psnr", "ssim", "mse", "avd"), description="how reconstructions are compared with the ground truth"
    )
    tolerance: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.05, description="by how much of its range a number of a table may be off"
    )
    ceiling: bool = Field(default=True, description="whether to bound what any attacker could recover")
    pictures: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        default=None, description="how many samples a run keeps with their reconstructions; 0 keeps none"
    )


class UtilityPart(Strict):
    epochs: Annotated[int, Field(ge=1, le=10_000)] = Field(default=10, description="passes over the data")
    batch_size: Count = Field(default=64, description="samples a step")
    clients: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="clients a step")
    lr: Positive | Literal["search"] = Field(
        default=0.05,
        description='the server\'s first step size, or "search": the best of a few per defense and loss',
    )
    seeds: Seeds = Field(default=(0, 1, 2), description="one training each")
    test: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.25, description="the share of the data held back")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(default=1e-5, description="at which epsilon is stated")
    tolerated_points: Annotated[float, Field(ge=0, le=100)] = Field(
        default=10.0, description="points of accuracy that a recommended defense may cost"
    )
    timed_steps: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=21, description="steps timed with and without the defense; 0 for none"
    )


class LimitsPart(Strict):
    seconds: Annotated[float, Field(gt=0, le=1e7)] | None = Field(
        default=None, description="after which a run is given up; not with --ray"
    )


class Plan(Strict):
    """What is audited. Frozen, and equal to another plan with the same content."""

    title: Annotated[str, Field(max_length=200)] = Field(default="", description="what the report is called")
    model: ModelPart | None = Field(default=None, description="the model that clients train")
    data: DataPart | None = Field(default=None, description="what the clients hold")
    captures: CapturesPart | None = Field(default=None, description="recorded updates, instead of data")
    federation: FederationPart = Field(default=FederationPart(), description="how clients train together")
    grid: GridPart = Field(default=GridPart(), description="what is varied")
    scores: ScoresPart = Field(default=ScoresPart(), description="how results are judged")
    utility: UtilityPart | None = Field(default=None, description="what defenses cost; left out: not measured")
    limits: LimitsPart = Field(default=LimitsPart(), description="when a run is given up")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.captures is not None:
            if self.data is not None or self.utility is not None:
                raise ValueError("an audit of captures has no [data] and no [utility]")
            if self.model is not None and self.model.factory is None:
                raise ValueError("captures name models of the table themselves; give a factory or no model")
        elif self.model is None or self.data is None:
            raise ValueError("add [model] and [data], or [captures]")
        return self

    def as_json(self) -> dict[str, Any]:
        """The plan with every default filled in."""
        document: dict[str, Any] = self.model_dump(mode="json")
        return document


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan. A key that is wrong is a BadPlan that names it."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_PLAN_BYTES + 1)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise BadPlan(f"{path.name or path}: {reason}. Create one with: fedprism init") from error
    if len(content) > MOST_PLAN_BYTES:
        raise BadPlan(f"'{path.name}' is larger than {MOST_PLAN_BYTES} bytes, the limit for a plan. Shorten it.")
    return parse_plan(content)


def parse_plan(content: bytes | str) -> Plan:
    """A plan from the text of a TOML file."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadPlan(f"the plan is not valid TOML ({reason}).") from error
    return checked_plan(document)


def checked_plan(document: dict[str, Any]) -> Plan:
    """A plan from what a TOML file holds."""
    try:
        # Through JSON: there a list may become a tuple without numbers becoming words.
        return Plan.model_validate_json(json.dumps(document))
    except (TypeError, RecursionError) as error:
        raise BadPlan(f"a plan holds numbers, words, lists and tables only ({error}). Remove the rest.") from error
    except ValidationError as error:
        raise BadPlan(sentence(error, Plan)) from error
