"""The types that flow through fedprism, in the order they appear: read this file first.

    Scenario --simulate--> (Observation, Truth)      Observation <--load-- capture on disk
    Observation --Attack--> Reconstruction           Truth never enters attacks/ or solvers/
    (Reconstruction, Truth) --score--> Scores

All inputs live in the *model's input space* (what the network is fed). `Knowledge.normalization` says how pixels became
inputs, `Knowledge.bounds` is the range of the pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fedprism.display.words import ShortRepr
from fedprism.errors import NotApplicable
from fedprism.inputs import Inputs as Inputs
from fedprism.inputs import (
    InputShape,
    InputTypes,
    blank_inputs,
    by_name,
    first_tensor,
    map_tensors,
    single_shape,
    single_tensor,
    unflattened,
)
from fedprism.inputs import arguments as arguments
from fedprism.optimizers import LocalOptimizer
from fedprism.pixels import stretched

Update: TypeAlias = Mapping[str, Tensor]
"""Parameter name -> tensor. May be a lazy view of an open file: read each tensor once and do not keep all of them."""

LossFn: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(what the model returns: a tensor, a tuple or a dict; labels) -> scalar, a mean over the batch."""

Kind: TypeAlias = Literal["gradient", "delta"]
Reduction: TypeAlias = Literal["sum", "mean", "weighted_mean"]
Ambiguity: TypeAlias = Literal["order", "sign", "scale", "places", "counts", "samples"]
"""What an attack cannot know: the order of its samples, the sign or the scale of their numbers; of whole numbers, which
place of a sample each stands in, how often, or in which sample."""

LEAST_BEYOND = 1e-3
"""Values beyond [0, 1] by less are shown as they are: it is no level of the 256 of a picture."""


@dataclass(frozen=True, repr=False)
class Batch(ShortRepr):
    """What a client trains on: inputs, and labels (batch, ...) of whatever shape the loss takes.

    Inputs are one tensor (batch, *input_shape), a tuple or a dict of such tensors; floating point or whole numbers
    (tokens, categories).
    """

    inputs: Inputs
    labels: Tensor

    @property
    def tensor(self) -> Tensor:
        """The inputs of a model that is fed one tensor."""
        return single_tensor(self.inputs)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor of the inputs changed by the function; labels stay."""
        return Batch(map_tensors(function, self.inputs), self.labels)

    def to(self, place: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """On the device, floating-point inputs in `dtype` where one is given."""
        moved = self.map(lambda tensor: tensor.to(place, dtype if tensor.dtype.is_floating_point else None))
        return Batch(moved.inputs, self.labels.to(place))

    def __len__(self) -> int:
        return len(first_tensor(self.inputs))

    def _repr_html_(self) -> str:
        """The first samples with their labels, for notebooks."""
        return _samples_html(f"Batch of {len(self)}", self.inputs, self.labels)

    def __getitem__(self, indices: Any) -> Batch:
        return Batch(map_tensors(lambda tensor: tensor[indices], self.inputs), self.labels[indices])


@dataclass(frozen=True, kw_only=True, repr=False)
class Round(ShortRepr):
    """What was sent and what came back: one client's update, or an aggregate of several.

    `update` is a gradient, or a delta (parameters after minus before). Several rounds may share an index: that is plain
    federated averaging seen client by client. `clients` is how many the update is of or, where the attacker does not
    know that, how many there are; a sum over nobody is zeros, of 0 clients.
    """

    params: Update
    update: Update
    kind: Kind = "gradient"
    reduction: Reduction = "mean"
    clients: int = 1
    index: int = 0
    participants: tuple[str, ...] | None = None
    examples: tuple[int, ...] | None = None
    buffers_before: Update | None = None
    buffers_after: Update | None = None

    @property
    def sent(self) -> Update:
        """All that the model was sent with: parameters and buffers."""
        return {**self.params, **(self.buffers_before or {})}


@dataclass(frozen=True, kw_only=True, repr=False)
class Knowledge(ShortRepr):
    """What the attacker knows beside the update. None means: does not know it.

    `input_shape` is that of one sample, in the structure of the inputs; `input_types` are granted with it, and None
    means floating point.

    `batch_size` is the number of samples behind an update, a tuple with one entry a round where rounds differ;
    `examples` is what each client trains on in a round, one entry a client. `labels` belong to the one update, or are a
    tuple: one entry a round where clients are seen one by one, one entry a
    client where several aggregates are seen. Under a defense that mixes samples they are those of the mixtures.

    `batchnorm_exact` belongs to the one update too, or is a tuple with one entry a round. `mixing` says of every
    mixture that a network was fed: "mapping" (mixtures, k) which samples are in it, "coefficients" (mixtures, k) with
    what weight, left out where only the mapping is known, "updates" (mixtures,) behind which of the rounds it is. The
    mixtures of an update are in the order in which they were fed; samples are numbered through all clients.

    `local_optimizer` is what clients step with and `local_momentum` SGD's momentum; neither stands for the other, and
    an optimizer that is not known may be any.

    Of R rounds and C clients: participation (R, C) bool, cohort_sizes (R,), windows (W, R) bool which rounds a window
    holds, counts (C, W) how often a client took part in each, NaN or -1 where unknown; `count_release` says how they
    were changed before they were reported, None not at all. Clients are called client-0, client-1, ... in the order of
    the columns unless participants are named.
    """

    input_shape: InputShape | None = None
    input_types: InputTypes | None = None
    bounds: tuple[float, float] | None = None
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    batch_size: int | tuple[int, ...] | None = None
    examples: tuple[int, ...] | None = None
    labels: Tensor | tuple[Tensor, ...] | None = None
    loss: str | LossFn | None = None
    local_lr: float | None = None
    local_epochs: int | None = None
    local_batch_size: int | None = None
    local_momentum: float | None = None
    local_optimizer: LocalOptimizer | None = None
    batchnorm_exact: Update | tuple[Update, ...] | None = None
    batchnorm_running: Update | None = None
    public_data: Batch | None = None
    windows: Tensor | None = None
    counts: Tensor | None = None
    count_release: Any = None
    participation: Tensor | None = None
    cohort_sizes: Tensor | None = None
    mixing: Update | None = None
    defense: Any = None

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample of a model that is fed one tensor; () where it is not known."""
        return single_shape(self.input_shape) if self.input_shape is not None else ()

    def blank(self, samples: int, like: Tensor | None = None) -> Inputs:
        """Zeros that the model can be fed: so many samples, as precise as `like`."""
        if self.input_shape is None:
            raise NotApplicable("the input_shape of the model is not known. Grant it.")
        return blank_inputs(self.input_shape, self.input_types, samples, like)

    def shaped(self, values: Tensor, like: Tensor | None = None) -> Inputs:
        """Flat samples (samples, all entries of a sample) as the model can be fed them, as precise as `like`."""
        return unflattened(values, self.blank(1, like))

    def granted(self) -> frozenset[str]:
        """Names of the fields that are known."""
        return frozenset(name for name in KNOWLEDGE_FIELDS if getattr(self, name) is not None)

    def restricted_to(self, names: frozenset[str]) -> Knowledge:
        """The same knowledge with every field outside `names` forgotten."""
        known = {name: getattr(self, name) for name in self.granted() & names}
        return Knowledge(**known, input_types=self.input_types if "input_shape" in names else None)


KNOWLEDGE_FIELDS = frozenset(f.name for f in dataclasses.fields(Knowledge)) - {"input_types"}
"""What can be granted: `input_types` go with `input_shape`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Observation(ShortRepr):
    """Everything an attacker has. `subject` says whose update it is, where that is known."""

    model: nn.Module | None
    rounds: tuple[Round, ...]
    knowledge: Knowledge = Knowledge()
    trapdoor: Mapping[str, Tensor] | None = None
    subject: str | None = None
    source: str = ""

    @property
    def round(self) -> Round:
        """The round of an observation of one update."""
        (round,) = self.rounds
        return round

    def granted(self) -> frozenset[str]:
        """Names of everything known: knowledge fields, and "model" and "trapdoor" where they are there."""
        extras = {name for name in ("model", "trapdoor") if getattr(self, name) is not None}
        return self.knowledge.granted() | extras


@dataclass(frozen=True, kw_only=True, repr=False)
class Reconstruction(ShortRepr):
    """What an attack got out of an observation.

    inputs in the model's input space and in its structure; labels (batch, ...); owners names whose each input is.
    `per_update` pairs each of several updates that were attacked one by one with its own answer.
    `ambiguity` declares what the attack cannot know; scoring may resolve these and nothing else.
    `knowledge_used` is filled in by the runner.
    """

    inputs: Inputs | None = None
    labels: Tensor | None = None
    features: Tensor | None = None
    updates: tuple[Update, ...] | None = None
    properties: Tensor | None = None
    owners: tuple[str, ...] | None = None
    per_update: tuple[tuple[Observation, Reconstruction], ...] | None = None
    ambiguity: frozenset[Ambiguity] = frozenset()
    status: str = ""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    knowledge_used: frozenset[str] = frozenset()

    @property
    def tensor(self) -> Tensor:
        """The inputs of a model that is fed one tensor, where there is an answer."""
        assert self.inputs is not None
        return single_tensor(self.inputs)

    def _repr_html_(self) -> str:
        """What came back, for notebooks; `fp.show` puts it beside the truth."""
        used = f"Knowledge used: {', '.join(sorted(self.knowledge_used)) or 'the update alone'}."
        return _samples_html("Reconstruction", self.inputs, self.labels, self.status, used)


@dataclass(frozen=True, kw_only=True, repr=False)
class Record(ShortRepr):
    """One line of a result: what was run, with what knowledge, and what came out. Holds no clock, host or path."""

    kind: Literal["attack", "utility", "ceiling"]
    run: Mapping[str, Any]
    """What was run: the attack, the defense and their settings."""
    knowledge_used: tuple[str, ...] = ()
    scores: Mapping[str, Any] | None = None
    accuracy: float | None = None
    time_factor: float | None = None
    epsilon: float | None = None
    residual: float | None = None
    """Of the update that the answer explains best."""
    updates: tuple[Mapping[str, Any], ...] = ()
    """What each update says about its own answer, as `evaluation.residuals.UpdateResidual` has it."""
    ceiling: Mapping[str, Any] | None = None
    """What no attacker can exceed, as `evaluation.ceiling.Ceiling` says it; None where it is unknown."""
    status: str = ""
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


def _samples_html(title: str, inputs: Inputs | None, labels: Tensor | None, *sentences: str) -> str:
    """Samples as a table with pictures. Inputs beyond [0, 1] are stretched to it: nobody here knows their range."""
    from fedprism.display import html

    pieces = [html.paragraph(title), *map(html.paragraph, filter(None, sentences))]
    if inputs is None:
        return html.lines([*pieces, html.paragraph("No inputs.")])
    rows: list[tuple[str, Callable[[int], object]]] = []
    beyond = False
    for name, tensor in by_name(inputs).items():
        few = tensor[: html.MOST_SAMPLES].detach().cpu()
        inside = (few >= -LEAST_BEYOND) & (few <= 1 + LEAST_BEYOND)
        if html.are_pictures(few) and len(few) and not bool(inside.all()):
            few, beyond = stretched(few.nan_to_num(0.0, 0.0, 0.0)), True
        rows.append((name, partial(html.sample, few, name=name)))
    count = len(first_tensor(inputs))
    if labels is not None and len(labels) == count:
        rows.append(("label", lambda place: html.values(labels[place])))
    pieces.append(html.samples(count, rows))
    if beyond:
        pieces.append(html.paragraph("Values beyond 0 to 1: each picture is stretched to fill that range."))
    return html.lines(pieces)


def is_soft(labels: Tensor) -> bool:
    """Whether labels are class probabilities (batch, classes) rather than class numbers (batch,)."""
    return labels.dtype.is_floating_point and labels.dim() == 2


def same_tensors(first: Update, second: Update | None) -> bool:
    """Whether two mappings hold the same numbers; the same object does without a look at them."""
    if first is second or second is None:
        return first is second
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def detached(update: Update) -> dict[str, Tensor]:
    """A plain dictionary of the same tensors, cut from any autograd graph and from any file."""
    return {name: tensor.detach().clone() for name, tensor in update.items()}


def move(update: Update, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the tensors on `device`; floating-point ones in `dtype`, whole numbers as they are.

    Always copies: a tensor that lies in a file is not aligned in memory, and products with it may round differently.
    """
    return {
        name: tensor.detach().to(device, dtype if tensor.dtype.is_floating_point else tensor.dtype, copy=True)
        for name, tensor in update.items()
    }
